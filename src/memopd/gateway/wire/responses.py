"""OpenAI's responses. The gateway keeps no conversations: a request has all of its input."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator

from memopd.gateway.ask import ApiError, Ask, Json, Said, Tool
from memopd.gateway.wire.shapes import (
    Count,
    Function,
    Schema,
    Shape,
    Temperature,
    Template,
    Text,
    TopP,
    assistant_message,
    chosen,
    event,
    joined,
    only,
    or_text,
    required,
    sampling_of,
)

# Requests


class Item(Shape):
    """A message, a function call or its output. Reasoning, which clients send back, is not repeated to the model."""

    ignored = frozenset({"status", "phase", "namespace", "internal_chat_message_metadata_passthrough"})

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Text = "user"
    content: Annotated[Text, joined("input_text", "output_text", "text")] = ""
    id: Text = ""
    call_id: Text = ""
    name: Text = ""
    arguments: Text = ""
    output: Annotated[Text, joined("input_text", "output_text", "text")] = ""

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return given.get("role") == "assistant" or given.get("type") in ("function_call", "reasoning")


def _items(value: Any) -> Any:
    """A text is a message of the user. The content of reasoning has another form, and is not needed."""
    if not isinstance(value, list):
        return [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [item for item in value if not isinstance(item, dict) or item.get("type") != "reasoning"]


class ToolChoice(Shape):
    type: Literal["none", "auto", "required", "function"]
    name: Text = ""


class Format(Shape):
    ignored = frozenset({"name", "description", "strict"})

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Schema = Field(default_factory=dict, alias="schema")  # pydantic's models have an attribute `schema`

    @model_validator(mode="after")
    def _complete(self) -> Format:
        if self.type == "json_schema" and not self.schema_:
            raise ValueError("schema is missing")
        return self


class TextOptions(Shape):
    ignored = frozenset({"verbosity"})

    format: Format = Format()


class Reasoning(Shape):
    ignored = frozenset({"summary", "generate_summary", "context"})

    effort: Text | None = None  # a variable of the chat templates that know it


class ResponsesRequest(Shape):
    ignored = frozenset(
        {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
        | {"stream_options", "client_metadata"}
    )

    model: Text
    input: Annotated[list[Item], Field(min_length=1), FailFast(), BeforeValidator(_items)]
    instructions: Text | None = None
    tools: Annotated[list[Function], FailFast()] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, or_text("type")] = ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    max_output_tokens: Count | None = None
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: list[Text] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    metadata: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    chat_template_kwargs: Template = Field(default_factory=dict)  # an extension of vLLM
    return_token_ids: bool = False  # an extension, as in chat completions

    previous_response_id: Annotated[Any, only(None)] = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    background: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None
    max_tool_calls: Annotated[Any, only(None)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include or self.top_logprobs > 0

    def ask(self) -> Ask:
        tools = tuple(tool.tool() for tool in self.tools)
        effort = {} if self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort}
        return Ask(
            model=self.model,
            messages=tuple(self._messages()),
            tools=() if self.tool_choice.type == "none" else tools,
            must_call=self._must_call(tools),
            parallel=self.parallel_tool_calls,
            output=self._output(),
            template=effort | self.chat_template_kwargs,
            sampling=sampling_of(self.temperature, self.top_p, 0, self.max_output_tokens),
            stream=self.stream,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
        )

    def answer(self, name: str) -> ResponsesAnswer:
        return ResponsesAnswer(name, self)

    def _must_call(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if self.tool_choice.type == "function":
            return chosen(tools, self.tool_choice.name)
        return required(tools) if self.tool_choice.type == "required" else ()

    def _output(self) -> Json | None:
        form = self.text.format
        if form.type == "text":
            return None
        return {"type": "object"} if form.type == "json_object" else form.schema_

    def _messages(self) -> list[Json]:
        """The assistant's text and the function calls after it were one completion, so they become one message."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turn: tuple[str, list[tuple[str, str, str]]] | None = None  # of the assistant: its text and calls
        for item in self.input:
            if item.type == "function_call":
                turn = turn or ("", [])
                turn[1].append((item.call_id, item.name, item.arguments))
                continue
            if turn is not None:
                messages.append(assistant_message(*turn))
                turn = None
            if item.type == "function_call_output":
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            elif item.role == "assistant":
                turn = (item.content, [])
            else:
                messages.append({"role": item.role, "content": item.content})
        return messages if turn is None else [*messages, assistant_message(*turn)]


# Answers


@dataclass(slots=True)
class ResponsesAnswer:
    name: str
    request: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))
    call_ids: str = "call_"
    _events: int = field(default=0, init=False)
    _at: int = field(default=0, init=False)  # the place of the text among the items of the output
    _is_open: bool = field(default=False, init=False)  # whether the text is

    def body(self, said: Said) -> Json:
        finished = said.finish == "stop"
        status = "completed" if finished else "incomplete"
        output = [self._message(said.text, status, said)] if said.text or not said.calls else []
        if said.reasoning:
            thought = {"type": "reasoning_text", "text": said.reasoning}
            item = {"id": f"rs_{self.name}", "type": "reasoning", "status": status, "summary": []}
            output.insert(0, item | {"content": [thought]})
        output += [self._call(said, n, status) for n in range(len(said.calls))]
        read, sampled = len(said.prompt), len(said.ids)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }
        ended = {"completed_at": int(time.time())} if finished else {}
        details = None if finished else {"reason": "max_output_tokens"}
        ids = {"prompt_token_ids": said.prompt, "token_ids": said.ids} if self.request.return_token_ids else {}
        return self._response(status) | ended | {"output": output, "usage": usage, "incomplete_details": details} | ids

    def opening(self, prompt: list[int]) -> list[str]:
        begun = self._response("in_progress")
        return [self._event(f"response.{kind}", response=begun) for kind in ("created", "in_progress")]

    def piece(self, text: str) -> list[str]:
        events = [] if self._is_open else self._begun()
        self._is_open = True
        return [*events, self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])]

    def closing(self, rest: str, said: Said) -> list[str]:
        """Function calls come whole, once it is certain that they are well formed."""
        body = self.body(said)
        events: list[str] = []
        for at, item in enumerate(body["output"]):
            if item["type"] == "message":
                self._at = at
                events += self.piece(rest) if rest or not self._is_open else []
                part = item["content"][0]
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                events.append(self._event("response.output_text.done", **self._place(), **done))
                events.append(self._event("response.content_part.done", **self._place(), part=part))
            else:
                empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
                begun = item | {"status": "in_progress"} | empty
                events.append(self._event("response.output_item.added", output_index=at, item=begun))
            if item["type"] == "function_call":
                place, written = {"item_id": item["id"], "output_index": at}, item["arguments"]
                events.append(self._event("response.function_call_arguments.delta", **place, delta=written))
                done = {"name": item["name"], "arguments": written}
                events.append(self._event("response.function_call_arguments.done", **place, **done))
            events.append(self._event("response.output_item.done", output_index=at, item=item))
        return [*events, self._event(f"response.{body['status']}", response=body)]

    def failure(self, error: ApiError) -> list[str]:
        failed = {"error": {"code": "server_error", "message": error.message}}
        return [self._event("response.failed", response=self._response("failed") | failed)]

    def _begun(self) -> list[str]:
        item = self._message("", "in_progress") | {"content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=self._at, item=item),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def _place(self) -> Json:
        return {"item_id": f"msg_{self.name}", "output_index": self._at, "content_index": 0}

    def _event(self, kind: str, **rest: Any) -> str:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1, **rest}, kind)

    def _message(self, text: str, status: str, said: Said | None = None) -> Json:
        logprobs = [
            _entry(t.text, t.logprob) | {"top_logprobs": [_entry(*e) for e in t.top]}
            for t in (said.tokens if said else None) or ()
        ]
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        head = {"id": f"msg_{self.name}", "type": "message", "role": "assistant", "status": status}
        return head | {"content": [content]}

    def _call(self, said: Said, n: int, status: str) -> Json:
        call = said.calls[n]
        head = {"id": f"fc_{self.name}-{n}", "type": "function_call", "call_id": call.id, "status": status}
        return head | {"name": call.name, "arguments": call.json}

    def _response(self, status: str) -> Json:
        """All that the format asks for; most of it repeats the request."""
        asked = self.request
        tools = [
            {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters}
            | {"strict": False}
            for t in asked.tools
        ]
        choice, form = asked.tool_choice, asked.text.format
        shown = {"type": form.type} | ({"schema": form.schema_} if form.type == "json_schema" else {})
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "model": asked.model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "tools": tools,
            "tool_choice": choice.model_dump() if choice.name else choice.type,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_logprobs": asked.top_logprobs,
            "max_output_tokens": asked.max_output_tokens,
            "text": {"format": shown},
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "metadata": asked.metadata,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "max_tool_calls": None,
            "safety_identifier": None,
            "prompt_cache_key": None,
        }


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
