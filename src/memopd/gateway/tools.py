"""Tool calls in the text of a completion: how a model writes them, how they are read, and how they are required.

A tokenizer with a `response_template` reads its own model's answers (`parse_response` of transformers). Otherwise the
one form that is known here is Hermes's, which Qwen writes too:

    Let me see.
    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 2}}
    </tool_call>

Reading never raises and never changes the recorded ids. What is not a well-formed call stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memopd.gateway.ask import ApiError, Json, Tool, ToolCall
from memopd.gateway.text import pending

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_PROBE = Tool("probe", "a tool", {"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True)
class Parsed:
    """The text of a completion without its tool calls, and these. Without calls it is the text as it is."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def is_same(self, text: str, calls: Sequence[ToolCall], partly: bool = False) -> bool:
        """Whether these are its text and its calls, or (`partly`) the first of its calls."""
        mine = self.calls[: len(calls)] if partly else self.calls
        if self.text != text or len(mine) != len(calls):
            return False
        return all(a.is_same(b) for a, b in zip(mine, calls, strict=True))


class ToolForm:
    """How the model of a tokenizer writes tool calls."""

    def __init__(self, tokenizer: Any) -> None:
        template = str(getattr(tokenizer, "chat_template", None))
        self.has_template = getattr(tokenizer, "response_template", None) is not None
        known = OPEN in template and "arguments" in template and "<function=" not in template  # Qwen3-Coder's form
        self.is_hermes = known and not self.has_template
        self.marks = (OPEN, CLOSE) if self.is_hermes else ()  # kept in the text, also where they are special tokens
        self._drops = _drops_tools(tokenizer)
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._grammar_marks = [mark if mark in added else json.dumps(mark) for mark in (OPEN, CLOSE)]

    def check(self) -> None:
        """Refuse tools that the model would not read, or whose calls nobody could read."""
        if self._drops:
            message = "this model's chat template drops `tools`: the model would never see them"
            raise ApiError(400, "no_tools", message, "tools")
        if not self.has_template and not self.is_hermes:
            message = "this model's tool calls cannot be read: its tokenizer has no response_template, and its chat "
            raise ApiError(400, "no_tools", message + "template does not write Hermes's <tool_call>", "tools")

    def parse(self, text: str) -> Parsed:
        """Read calls in Hermes's form. Text beside them is kept, except for the line break before a call."""
        if not self.is_hermes:
            return Parsed(text)
        kept, calls, at = [], [], 0
        while (start := text.find(OPEN, at)) >= 0:
            body = start + len(OPEN)
            if (found := _call(text, body)) is None:
                kept.append(text[at:body])
                at = body
            else:
                kept.append(text[at:start].removesuffix("\n"))
                call, at = found
                calls.append(call)
        rest = "".join([*kept, text[at:]])
        return Parsed(rest if rest.strip() else "", tuple(calls)) if calls else Parsed(text)

    def parse_whole(self, tokenizer: Any, text: str, full: str, prompt: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """Read the calls of a completion with this visible text. A response template reads the full text, which has the
        special tokens; the last one, which ends the turn, is no part of a field that the model left open."""
        if not self.has_template:
            return self.parse(text)
        try:
            given = [tool.for_template() for tool in tools]
            said = full.removesuffix(tokenizer.eos_token or "")
            message = tokenizer.parse_response(said, prefix=list(prompt), tools=given or None)
            calls = tuple(_read(call.get("function", call)) for call in message.get("tool_calls") or [])
            reasoning = message.get("thinking") or message.get("reasoning_content") or ""
            return Parsed(_text(message.get("content") or ""), calls, _text(reasoning))
        except Exception:  # a template is a model's own program, and a completion may be anything
            return Parsed(text)

    def certain(self, text: str) -> int:
        """How many characters of this text stay text, whatever follows them in the stream."""
        if self.has_template:
            return 0
        if not text.strip():
            return 0  # space before a call alone is dropped
        start = text.find(OPEN)
        if start >= 0:
            return len(text[:start].removesuffix("\n")) if text[:start].strip() else 0
        return len(text) - pending(text, (OPEN, "\n" + OPEN))

    def grammar(self, tools: Sequence[Tool], parallel: bool, output: Json | None) -> str:
        """A grammar (engine/guide.py) for an answer that calls some of these tools, or whose text follows a JSON
        schema, or either of the two if both are given."""
        if not tools:
            assert output is not None
            return f"start: {_json(output)}\n"
        if not self.is_hermes and output is None:
            message = "this model's form of tool calls cannot be required: send tool_choice auto"
            raise ApiError(400, "no_grammar", message, "tool_choice")
        if not self.is_hermes:
            message = "this model's form of tool calls has no grammar: send tools or a schema for the answer, not both"
            raise ApiError(400, "no_grammar", message, "tools")
        opening, closing = self._grammar_marks
        lines = ["start: calls" if output is None else "start: calls | output"]
        lines += [] if output is None else [f"output: {_json(output)}"]
        lines.append('calls: call ("\\n" call)*' if parallel else "calls: call")
        lines.append("call: " + " | ".join(f"call_{n}" for n in range(len(tools))))
        for n, tool in enumerate(tools):
            head = _dumps(f'\n{{"name": {_dumps(tool.name)}, "arguments": ')
            lines.append(f'call_{n}: {opening} {head} arguments_{n} "}}\\n" {closing}')
            lines.append(f"arguments_{n}: {_json({'type': 'object'} | tool.parameters)}")
        return "\n".join(lines) + "\n"


def with_ids(calls: Sequence[ToolCall], name: str) -> tuple[ToolCall, ...]:
    """The calls of the completion with this name, each with an id of its own."""
    return tuple(replace(call, id=f"{name}{n}") for n, call in enumerate(calls))


def arguments_of(text: str) -> Json | str:
    """The arguments that a client sends back: an object for the chat template, or the text where it is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _call(text: str, at: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON begins at `at`, and where it ends. The closing mark may be missing at the text's end.

    The JSON's own end decides, not the first closing mark: that may be part of an argument.
    """
    start = _end_of_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
        call = _read(value)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    end = _end_of_space(text, end)
    if text.startswith(CLOSE, end):
        return call, end + len(CLOSE)
    return (call, end) if end == len(text) else None


def _read(value: Any) -> ToolCall:
    name, arguments = value["name"], value["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a call")
    check_depth(arguments)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written).encode()  # half a surrogate pair cannot be sent
    return ToolCall(name, arguments, written)


def check_depth(value: Any, left: int = 64) -> None:
    """Refuse JSON that is nested so deeply that writing it again could fail."""
    if not left:
        raise ValueError("is nested too deeply")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, left - 1)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _json(schema: Json) -> str:
    """A schema in a grammar, with the spaces that chat templates write: a call then reads the same when it returns."""
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {_dumps(schema | {'x-guidance': spaces})}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    value.encode()
    return value


def _drops_tools(tokenizer: Any) -> bool:
    """Whether the chat template makes the same prompt with tools and without."""
    if getattr(tokenizer, "chat_template", None) is None:
        return True

    def rendered(**tools: Any) -> str:
        messages = [{"role": "user", "content": "x"}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools))

    try:
        return rendered(tools=[_PROBE.for_template()]) == rendered()
    except Exception:  # a template may raise any exception
        return True
