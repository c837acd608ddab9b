"""Drift: an agent sends earlier replies back as text, and the text may encode to other ids than the model sampled.

The model then reads a history that it did not write. `chat_ids` replaces the text of an earlier reply by its sampled
ids if the chat template passes the reply on unchanged. Tool calls come back parsed, and the template writes them anew,
perhaps with other spaces: there the sampled ids are used if the calls are the same. `drift` reports where the ids of a
prompt differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd.gateway.ask import Tool, ToolCall
from memopd.gateway.text import full_text
from memopd.gateway.tools import Parsed, ToolForm
from memopd.types import Ids

_MIN_TOKENS = 4  # a shorter reply ("Yes") may be in a prompt by chance


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An earlier completion of the episode, without the end-of-turn token, which the chat template adds."""

    ids: Ids
    text: str
    shown: str  # the text that the client received: up to the stop string
    parsed: Parsed | None = None  # if it has tool calls


@dataclass(frozen=True, slots=True)
class History:
    """How many earlier replies a prompt repeats, and how many of them have other ids than the model sampled.

    >>> History(replies=3, drifted=1, first=417).drifted  # one of three has other ids, from position 417 on
    1
    """

    replies: int = 0
    drifted: int = 0
    first: int | None = None  # the first position in the prompt whose id differs from the sampled one


def decode(tokenizer: Any, ids: Sequence[int] | Ids) -> str:
    """The text of all ids, including special tokens, with every space as it is."""
    return str(tokenizer.decode(_list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []


def reply_of(
    tokenizer: Any,
    completion: Ids,
    shown: int,
    form: ToolForm | None = None,
    prompt: Sequence[int] | Ids = (),
    tools: Sequence[Tool] = (),
) -> Reply:
    """`shown` is the number of characters that the client received."""
    ids = completion[:-1] if int(completion[-1]) in tokenizer.all_special_ids else completion
    text = decode(tokenizer, ids)
    parsed = None
    if form is not None:
        full = full_text(tokenizer, completion, shown) if form.has_template else text
        parsed = form.parse_whole(tokenizer, text, full, _list(prompt), tools)
    return Reply(ids, text, text[:shown], parsed if parsed and parsed.calls else None)


def repeated_reply(message: Mapping[str, Any], replies: Sequence[Reply], partly: bool = False) -> Reply | None:
    """The reply that a message of the assistant repeats: the same text, and the same tool calls, or (`partly`) the
    first of them, which is all that a client gets that wants one call at a time."""
    if message["role"] != "assistant":
        return None
    text, calls = message.get("content") or "", _calls(message)
    for reply in reversed(replies):  # the last of several equal replies
        if not calls and reply.text == text and text:
            return reply
        if calls and reply.parsed and reply.parsed.is_same(text, calls, partly):
            return reply
    return None


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    replies: Sequence[Reply],
    check: Callable[[str], None] = lambda text: None,
    form: ToolForm | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt's ids under the chat template, with the sampled ids for messages that repeat an earlier reply.

    `check` gets the prompt's text before it is encoded, and may raise an error. `options` are the template's further
    variables.

    A message repeats a reply if their texts are equal, and their tool calls. The sampled ids are used only if the
    template passes replies on unchanged, or writes the same tool calls, and the rest of the prompt stays the same.
    """
    options = options or {}
    text = _rendered(tokenizer, messages, options)
    check(text)
    ids = encode(tokenizer, text)
    repeated = [(n, reply) for n, m in enumerate(messages) if (reply := repeated_reply(m, replies))]
    if not repeated:
        return ids
    marks = {n: f"\ue000{n}\ue001" for n, _ in repeated}  # private-use characters, which ordinary text does not have
    marked = [{"role": m["role"], "content": marks[n]} if n in marks else m for n, m in enumerate(messages)]
    try:
        rest = _rendered(tokenizer, marked, options)
    except Exception:  # a template may refuse a tool's result without the call
        return ids
    around: list[str] = []
    for n, _ in repeated:
        before, mark, rest = rest.partition(marks[n])
        if not mark:
            return ids
        around.append(before)
    around.append(rest)
    if not (written := _between(text, around, [reply for _, reply in repeated])):
        return ids
    spliced, rebuilt = encode(tokenizer, around[0]), around[0]
    for (_, reply), said, after in zip(repeated, written, around[1:], strict=True):
        if said != reply.text and not _is_rewritten(said, reply, form):
            return ids
        spliced += reply.ids.tolist() + encode(tokenizer, after)
        rebuilt += reply.text + after
    same = ids if rebuilt == text else encode(tokenizer, rebuilt)
    return spliced if decode(tokenizer, spliced) == decode(tokenizer, same) else ids


def _between(text: str, around: Sequence[str], replies: Sequence[Reply]) -> list[str]:
    """What the template wrote for each reply: the parts of the prompt between the texts around them; empty if the
    prompt has other texts there."""
    if not text.startswith(around[0]) or not text.endswith(around[-1]):
        return []
    written, at, last = [], len(around[0]), len(replies) - 1
    for n, reply in enumerate(replies):
        after = around[n + 1]
        if text.startswith(reply.text + after, at):
            end = at + len(reply.text)
        else:
            end = len(text) - len(after) if n == last else text.find(after, at)
        if end < at:
            return []
        written.append(text[at:end])
        at = end + len(after)
    return written if at == len(text) else []


def _is_rewritten(said: str, reply: Reply, form: ToolForm | None) -> bool:
    """Whether the template wrote this reply's tool calls, in its own way. A response template may need the frame of a
    message, which a part of the prompt lacks; then the message's own calls, which are the reply's, must do."""
    if form is None or reply.parsed is None:
        return False
    return form.has_template or form.parse(said).is_same(reply.parsed.text, reply.parsed.calls)


def _calls(message: Mapping[str, Any]) -> list[ToolCall]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [ToolCall(f["name"], f["arguments"], "") for f in functions]


def drift(
    tokenizer: Any, prompt: Sequence[int], replies: Sequence[Reply], messages: Sequence[Mapping[str, Any]] = ()
) -> History:
    """Count the replies that this prompt repeats, and find where their ids differ from the sampled ones.

    Tool calls that a message repeats, but the template writes in another way, have drifted too; their place is unknown.
    """
    rewritten = [reply for m in messages if m.get("tool_calls") and (reply := repeated_reply(m, replies, True))]
    packed = np.asarray(prompt, np.int32).tobytes()
    text: str | None = None
    found = drifted = 0
    first: int | None = None
    for reply in replies:
        if len(reply.ids) < _MIN_TOKENS:
            continue
        if _contains(packed, reply.ids.tobytes()):
            found += 1
            continue
        text = decode(tokenizer, prompt) if text is None else text
        repeated = reply.text if reply.text in text else reply.shown
        if not repeated.strip() or repeated not in text:
            missed = any(reply is other for other in rewritten)
            found, drifted = found + missed, drifted + missed
            continue
        found += 1
        position = _first_difference(tokenizer, prompt, text.index(repeated), reply.ids, len(repeated))
        if position is not None:
            drifted += 1
            first = position if first is None else min(first, position)
    return History(found, drifted, first)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options))


def _first_difference(tokenizer: Any, prompt: Sequence[int], at: int, sampled: Ids, length: int) -> int | None:
    """The first position at which the ids of the text from character `at` on differ from the sampled ones."""
    start = bisect_right(range(len(prompt) + 1), at, key=lambda n: len(decode(tokenizer, prompt[:n]))) - 1
    if len(decode(tokenizer, prompt[:start])) < at:
        return start  # one token contains both the reply's first character and the one before it
    same = 0
    while same < min(len(sampled), len(prompt) - start) and sampled[same] == prompt[start + same]:
        same += 1
    return None if len(decode(tokenizer, sampled[:same])) >= length else start + same


def _contains(data: bytes, part: bytes) -> bool:
    at = data.find(part)
    while at >= 0 and at % 4:  # a match that begins in the middle of an id is none
        at = data.find(part, at + 1)
    return at >= 0


def _list(ids: Sequence[int] | Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
