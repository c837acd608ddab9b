"""Anthropic's messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from memopd.gateway.ask import ApiError, Ask, Json, Said, Tool, ToolCall
from memopd.gateway.wire.shapes import (
    Count,
    Schema,
    Shape,
    Stops,
    Temperature,
    Template,
    Text,
    TopK,
    TopP,
    assistant_message,
    chosen,
    event,
    joined,
    only,
    required,
    sampling_of,
)

_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip

# Requests


class Block(Shape):
    """A part of a message. The model's thoughts, which clients send back, are not repeated to it."""

    ignored = frozenset({"cache_control", "citations", "is_error"})

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Text = ""
    id: Text = ""
    name: Text = ""
    input: Schema = Field(default_factory=dict)
    tool_use_id: Text = ""
    content: Annotated[Text, joined("text")] = ""

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return given.get("type") not in ("text", "tool_result")  # a type that is not supported is refused as such


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Shape):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FailFast(), BeforeValidator(_blocks)]

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return given.get("role") == "assistant"

    def for_template(self) -> list[Json]:
        """A message of the user with results of tools is several messages for the chat template."""
        if self.role == "assistant":
            uses = [(b.id, b.name, json.dumps(b.input)) for b in self.content if b.type == "tool_use"]
            return [assistant_message("".join(b.text for b in self.content), uses)]
        messages: list[Json] = []
        for block in self.content:
            if block.type == "tool_result":
                messages.append({"role": "tool", "content": block.content, "tool_call_id": block.tool_use_id})
            elif messages and messages[-1]["role"] == self.role:
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": self.role, "content": block.text})
        return messages


class CustomTool(Shape):
    ignored = frozenset({"cache_control", "strict", "eager_input_streaming", "defer_loading", "input_examples"})

    type: Literal["custom"] = "custom"
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    input_schema: Schema = Field(default_factory=dict)


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: Text = ""
    disable_parallel_tool_use: bool = False


class OutputFormat(Shape):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")  # pydantic's models have an attribute `schema`


class OutputConfig(Shape):
    ignored = frozenset({"effort"})

    format: OutputFormat | None = None


class Edit(Shape):
    type: Literal["clear_thinking_20251015"]  # there are no thoughts to clear
    keep: Any = None


class ContextManagement(Shape):
    edits: list[Edit] = Field(default_factory=list)


class Thinking(Shape):
    ignored = frozenset({"display"})

    type: Literal["disabled", "adaptive"]  # with "enabled" a client counts on thoughts


class CountRequest(Shape):
    """The fields that make the prompt."""

    ignored = frozenset({"metadata", "service_tier", "cache_control", "container", "inference_geo", "speed"})

    model: Text
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    system: Annotated[Text, joined("text")] = ""
    tools: Annotated[list[CustomTool], FailFast()] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()
    mcp_servers: Annotated[Any, only([])] = None
    chat_template_kwargs: Template = Field(default_factory=dict)  # an extension of vLLM

    def ask(self) -> Ask:
        return Ask(model=self.model, **self._prompt())

    def _prompt(self) -> Json:
        tools = tuple(Tool(tool.name, tool.description, tool.input_schema) for tool in self.tools)
        system = [{"role": "system", "content": self.system}] if self.system else []
        form = self.output_config.format
        return {
            "messages": (*system, *(m for message in self.messages for m in message.for_template())),
            "tools": () if self.tool_choice.type == "none" else tools,
            "must_call": self._must_call(tools),
            "parallel": not self.tool_choice.disable_parallel_tool_use,
            "output": None if form is None else form.schema_,
            "template": self.chat_template_kwargs,
        }

    def _must_call(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if self.tool_choice.type == "tool":
            return chosen(tools, self.tool_choice.name)
        return required(tools) if self.tool_choice.type == "any" else ()


class MessagesRequest(CountRequest):
    max_tokens: Count
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    stop_sequences: Stops = ()
    stream: bool = False
    return_token_ids: bool = False  # an extension, as in chat completions

    def ask(self) -> Ask:
        return Ask(
            model=self.model,
            **self._prompt(),
            sampling=sampling_of(self.temperature, self.top_p, self.top_k, self.max_tokens),
            stop=self.stop_sequences,
            stream=self.stream,
        )

    def answer(self, name: str) -> MessagesAnswer:
        return MessagesAnswer(f"msg_{name}", self.model, self.return_token_ids)


# Answers


@dataclass(slots=True)
class MessagesAnswer:
    id: str
    model: str
    with_ids: bool = False
    call_ids: str = "toolu_"
    _blocks: int = field(default=0, init=False)  # that were begun
    _is_open: bool = field(default=False, init=False)  # whether the text is

    def body(self, said: Said) -> Json:
        content: list[Json] = [{"type": "text", "text": said.text, "citations": None}] if said.text else []
        if said.reasoning:
            content.insert(0, {"type": "thinking", "thinking": said.reasoning, "signature": ""})
        content += [_use(call) | {"input": call.arguments} for call in said.calls]
        usage = _usage(len(said.prompt), len(said.ids))
        ids = {"prompt_token_ids": said.prompt, "token_ids": said.ids} if self.with_ids else {}
        return self._message(usage) | {"content": content} | _ended(said) | ids

    def opening(self, prompt: list[int]) -> list[str]:
        ids = {"prompt_token_ids": prompt} if self.with_ids else {}
        start = {"type": "message_start", "message": self._message(_usage(len(prompt), 0)) | ids}
        return [event(start, "message_start"), event({"type": "ping"}, "ping")]

    def piece(self, text: str) -> list[str]:
        begun = [] if self._is_open else [self._start({"type": "text", "text": ""})]
        self._is_open = True
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def closing(self, rest: str, said: Said) -> list[str]:
        """Tool calls come whole, once it is certain that they are well formed."""
        events: list[str] = []
        if said.reasoning:  # of a response template, with which the text comes at the end too
            events.append(self._start({"type": "thinking", "thinking": "", "signature": ""}))
            events += [self._delta({"type": "thinking_delta", "thinking": said.reasoning}), self._stop()]
        events += self.piece(rest) if rest else []
        events += [self._stop()] if self._is_open else []
        for call in said.calls:
            events.append(self._start(_use(call) | {"input": {}}))
            events += [self._delta({"type": "input_json_delta", "partial_json": call.json}), self._stop()]
        usage = _usage(len(said.prompt), len(said.ids))
        last: Json = {"type": "message_delta", "delta": _ended(said), "usage": usage}
        last |= {"token_ids": said.ids} if self.with_ids else {}
        return [*events, event(last, "message_delta"), event({"type": "message_stop"}, "message_stop")]

    def failure(self, error: ApiError) -> list[str]:
        return [event(error_body(error), "error")]

    def _message(self, usage: Json) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        ended = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        return head | ended | {"usage": usage, "container": None}

    def _start(self, block: Json) -> str:
        self._blocks += 1
        return self._event("content_block_start", content_block=block)

    def _delta(self, delta: Json) -> str:
        return self._event("content_block_delta", delta=delta)

    def _stop(self) -> str:
        return self._event("content_block_stop")

    def _event(self, kind: str, **rest: Json) -> str:
        return event({"type": kind, "index": self._blocks - 1, **rest}, kind)


def error_body(error: ApiError) -> Json:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}


def _use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "caller": {"type": "direct"}}


def _ended(said: Said) -> Json:
    if said.finish == "length":
        reason = "max_tokens"
    elif said.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if said.stopped_by is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": said.stopped_by if reason == "stop_sequence" else None}


def _usage(read: int, sampled: int) -> Json:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    unknown = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")
    return {"input_tokens": read, "output_tokens": sampled} | cached | dict.fromkeys(unknown)
