"""A call in the form that every wire format is translated into, and its answer in the form that they translate back.

    body ── wire ──> Ask ── recorder.py: ids, engine, journal ──> Said ── wire ──> body or events

Nothing here knows HTTP, and the recorder knows no wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memopd.types import Sampling

Json: TypeAlias = dict[str, Any]


class ApiError(Exception):
    """An error answer. The client gets `message`; the log gets the other fields, which never quote the client."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.cause = cause  # only for the log


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the agent offers. The gateway never runs one."""

    name: str
    description: str | None = None
    parameters: Json = field(default_factory=dict)  # a JSON schema

    def for_template(self) -> Json:
        """The form that chat templates expect."""
        function: Json = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Json
    json: str  # the arguments as text
    id: str = ""

    def is_same(self, other: ToolCall) -> bool:
        return (self.name, self.arguments) == (other.name, other.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asks for."""

    model: str
    messages: tuple[Json, ...] = ()  # as chat templates expect them: `arguments` of tool calls are objects
    prompt: str | tuple[int, ...] | None = None  # instead of messages
    tools: tuple[Tool, ...] = ()  # that the model reads
    must_call: tuple[Tool, ...] = ()  # the completion must call one of these
    parallel: bool = True  # whether the answer may have several tool calls
    output: Json | None = None  # the JSON schema that the answer's text must follow
    template: Json = field(default_factory=dict)  # further variables of the chat template
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    keep_stop: bool = False  # whether the text of the answer includes the stop string
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def is_constrained(self) -> bool:
        return self.output is not None or bool(self.must_call)

    def size(self) -> int:
        """The number of characters that have to be encoded; the template adds to it."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token: its text alone, its log-probability, and the likeliest tokens in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """The part of a completion that the client receives."""

    text: str  # without tool calls and without the stop string
    calls: tuple[ToolCall, ...]
    reasoning: str  # what the tokenizer's response template separates from the text
    finish: str  # "stop" or "length"
    stopped_by: str | None  # the stop string
    prompt: list[int]
    ids: list[int]
    tokens: list[Token] | None  # with `logprobs`
