"""From what a client asks for to the ids that the model reads. Every thread has a tokenizer of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from memopd.engine.stops import vocabulary_bytes
from memopd.gateway.ask import ApiError, Ask, Json
from memopd.gateway.drift import History, Reply, chat_ids, drift, encode, reply_of
from memopd.gateway.episodes import Recorded
from memopd.gateway.tools import ToolForm

TOKENIZERS = 3  # prompts that are encoded at once: a long one must not hold up the other sessions


class Prompts:
    """Makes prompts in threads, because the event loop must not wait. A tokenizer is not thread-safe, so each thread
    has a copy; the copies are made here, because copying a large one stops all threads for a second."""

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.form = ToolForm(tokenizer)
        self._max_length = max_length
        longest = max(map(len, vocabulary_bytes(tokenizer, len(tokenizer))), default=1)
        self._max_bytes = None if max_length is None else max_length * longest
        self._local = threading.local()
        copies = [deepcopy(tokenizer) for _ in range(TOKENIZERS)]
        self.threads = ThreadPoolExecutor(
            TOKENIZERS, "tokenizer", lambda: setattr(self._local, "tokenizer", copies.pop())
        )
        self._replies: WeakKeyDictionary[Recorded, Reply] = WeakKeyDictionary()  # a cache of the decoded completions

    def check(self, ask: Ask) -> None:
        """Refuse at once what cannot be prompted, before a thread works on it."""
        self._check_bytes(ask.size())  # characters: never more than bytes, and known at once
        if ask.tools:
            self.form.check()

    def ids(self, ask: Ask, earlier: Sequence[Recorded]) -> tuple[list[int], History]:
        """The prompt's ids, and which earlier replies they repeat. Runs in one of `threads`."""
        tokenizer = self._local.tokenizer
        for r in earlier:
            if r not in self._replies:
                call = r.call
                self._replies[r] = reply_of(tokenizer, call.completion, r.shown, self.form, call.prompt, ask.tools)
        replies = [self._replies[r] for r in earlier]
        if ask.prompt is None:
            messages = with_known_roles(tokenizer, ask.messages)
            ids = prompt_of(tokenizer, ask, messages, replies, self.form, self._check_bytes)
        else:
            messages, ids = [], self._encoded(tokenizer, ask.prompt)
        if not ids:
            raise ApiError(400, "empty_prompt", "the prompt has no tokens", "prompt")
        if self._max_length is not None and len(ids) >= self._max_length:
            return ids, History()  # the engine will refuse it, and the comparison would take long
        return ids, drift(tokenizer, ids, replies, messages)

    def grammar(self, ask: Ask) -> str:
        """The grammar that the completion must follow; empty if there is none."""
        if ask.must_call:  # the answer must call a tool, so its text never follows `output`
            return self.form.grammar(ask.must_call, ask.parallel, None)
        return "" if ask.output is None else self.form.grammar(ask.tools, ask.parallel, ask.output)

    def _encoded(self, tokenizer: Any, prompt: str | tuple[int, ...]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        self._check_bytes(len(prompt.encode()))
        return encode(tokenizer, prompt, special=True)

    def _check_bytes(self, size: int) -> None:
        """Refuse a text that is too long whatever its tokens are, before a tokenizer spends seconds on it."""
        if self._max_bytes is not None and size > self._max_bytes:
            most = f"{self._max_length} tokens have at most {self._max_bytes} bytes"
            raise ApiError(400, "context_length_exceeded", f"the prompt is longer than the model's context: {most}")


def prompt_of(
    tokenizer: Any,
    ask: Ask,
    messages: Sequence[Json],
    replies: Sequence[Reply],
    form: ToolForm,
    check_bytes: Callable[[int], None] = lambda size: None,
) -> list[int]:
    """The ids of a chat. `check_bytes` gets the size of its text before that is encoded."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(400, "no_chat_template", "this model has no chat template: use /v1/completions", "messages")

    def check(text: str) -> None:
        check_bytes(len(text.encode()))
        _check_complete(messages, text)

    options = {"tools": [tool.for_template() for tool in ask.tools]} if ask.tools else {}
    try:
        return chat_ids(tokenizer, messages, replies, check, form, options | ask.template)
    except ApiError:
        raise
    except Exception as error:  # a template may raise any exception
        message = f"the chat template refuses these messages: {error}"
        raise ApiError(400, "chat_template", message, "messages") from None


def with_known_roles(tokenizer: Any, messages: Sequence[Json]) -> list[Json]:
    """`developer` is `system` for the many templates that know only the role's older name."""
    if "developer" in str(getattr(tokenizer, "chat_template", None)):
        return list(messages)
    return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]


def _check_complete(messages: Sequence[Json], text: str) -> None:
    """Refuse a message that the chat template leaves out, as Qwen's does with roles that it does not know.

    Templates may shorten earlier replies and quote the results of tools, so these are not compared, except for the
    names of the tools that the assistant called.
    """
    for n, message in enumerate(messages):
        role, place = message["role"], f"messages[{n}]"
        if role not in ("assistant", "tool", "function") and message["content"].strip() not in text:
            why = f"the chat template leaves out {place}: does it know the role {role[:60]!r}?"
            raise ApiError(400, "chat_template", why, place)
        if not all(call["function"]["name"] in text for call in message.get("tool_calls", ())):
            raise ApiError(400, "chat_template", f"the chat template leaves out the tool calls of {place}", place)
