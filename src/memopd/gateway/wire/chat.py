"""OpenAI's chat completions and completions, with vLLM's extensions."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, ValidationInfo, field_validator, model_validator

from memopd.gateway.ask import ApiError, Ask, Json, Said, Token, Tool
from memopd.gateway.wire.shapes import (
    Count,
    Function,
    Seed,
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
    openai_error,
    or_text,
    required,
    sampling_of,
)

_COMPLETION_TOKENS = 16  # OpenAI's default for /completions; a chat may use all that the engine allows
_MOST_LOGPROBS = 20

# Requests


class StreamOptions(Shape):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class EchoedFunction(Shape):
    name: Text
    arguments: Annotated[Text, BeforeValidator(lambda v: json.dumps(v) if isinstance(v, dict) else v)] = ""

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return True


class EchoedCall(Shape):
    id: Text = ""
    function: EchoedFunction

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return True


class Message(Shape):
    """Clients send the assistant's messages back with all that they got, and more of their own: that passes."""

    empty: ClassVar[list[Any]] = [None, []]

    role: Text
    content: Annotated[Text, joined("text")] | None = Field(default=None, validate_default=True)
    name: Text | None = None
    tool_calls: Annotated[list[EchoedCall], FailFast()] = Field(default_factory=list)
    tool_call_id: Text | None = None

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        return given.get("role") == "assistant"

    @field_validator("content")
    @classmethod
    def _spoken(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("missing")
        return content

    def for_template(self) -> Json:
        if self.role == "assistant":
            calls = [(call.id, call.function.name, call.function.arguments) for call in self.tool_calls]
            message = assistant_message(self.content or "", calls)
        else:
            message = {"role": self.role, "content": self.content}
        rest = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in rest.items() if value is not None}


class ChatTool(Shape):
    type: Literal["function"] = "function"
    function: Function


def _format_schema(value: Any) -> Json:
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        raise ValueError("must be an object with a schema")
    return dict(value["schema"])


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[Any, PlainValidator(_format_schema)] = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    def output(self) -> Json | None:
        if self.type == "text":
            return None
        return {"type": "object"} if self.type == "json_object" else dict(self.json_schema)


class NamedFunction(Shape):
    name: Text = ""


class ToolChoice(Shape):
    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction = NamedFunction()


class GenerationRequest(Shape):
    """The fields that chats and completions share."""

    ignored = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

    model: Text
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: Stops = ()
    include_stop_str_in_output: bool = False  # an extension of vLLM
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False  # an extension of vLLM

    n: Annotated[Any, only(1)] = 1
    best_of: Annotated[Any, only(1)] = 1
    echo: Annotated[Any, only(False)] = False
    suffix: Annotated[Any, only("")] = ""
    logit_bias: Annotated[Any, only({})] = None
    presence_penalty: Annotated[Any, only(0)] = 0
    frequency_penalty: Annotated[Any, only(0)] = 0
    repetition_penalty: Annotated[Any, only(1)] = 1
    min_p: Annotated[Any, only(0)] = 0
    modalities: Annotated[Any, only(["text"])] = None

    def _common(self, limit: int | None) -> Json:
        return {
            "model": self.model,
            "sampling": sampling_of(self.temperature, self.top_p, self.top_k, limit),
            "seed": self.seed,
            "stop": self.stop,
            "keep_stop": self.include_stop_str_in_output,
            "stream": self.stream,
        }


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[ChatTool], FailFast()] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, or_text("type")] = ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] = 0
    chat_template_kwargs: Template = Field(default_factory=dict)
    reasoning_effort: Text | None = None  # a variable of the chat templates that know it
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None

    def ask(self) -> Ask:
        tools = tuple(tool.function.tool() for tool in self.tools)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return Ask(
            **self._common(self.max_completion_tokens or self.max_tokens),
            messages=tuple(message.for_template() for message in self.messages),
            tools=() if self.tool_choice.type == "none" else tools,
            must_call=self._must_call(tools),
            parallel=self.parallel_tool_calls,
            output=self.response_format.output(),
            template=effort | self.chat_template_kwargs,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else 0,
        )

    def _must_call(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if self.tool_choice.type == "function":
            return chosen(tools, self.tool_choice.function.name)
        return required(tools) if self.tool_choice.type == "required" else ()

    def answer(self, name: str) -> ChatAnswer:
        return ChatAnswer(f"chatcmpl-{name}", self)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must be a string of Unicode text") from None
        return value
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be one text or one list of token ids")
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        raise ValueError("token ids must be between 0 and the size of the vocabulary")
    return tuple(value)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, PlainValidator(_prompt)]  # one text, or one list of token ids
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)] | None = None  # 0: of the sampled tokens alone

    def ask(self) -> Ask:
        common = self._common(self.max_tokens or _COMPLETION_TOKENS)
        return Ask(
            **common, prompt=self.prompt, logprobs=self.logprobs is not None, top_logprobs=self.logprobs or 0
        )  # fmt: skip

    def answer(self, name: str) -> CompletionAnswer:
        return CompletionAnswer(f"cmpl-{name}", self)


# Answers


@dataclass(slots=True)
class _Answer:
    """The parts of an answer that chats and completions share."""

    id: str
    request: GenerationRequest
    created: int = field(default_factory=lambda: int(time.time()))
    call_ids = "call_"

    def failure(self, error: ApiError) -> list[str]:
        return [event(openai_error(error))]

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _choice(self, said: Said, finish: str, logprobs: Json | None) -> Json:
        choice: Json = {"index": 0, "finish_reason": finish, "stop_reason": said.stopped_by, "logprobs": logprobs}
        return choice | ({"token_ids": said.ids} if self.request.return_token_ids else {})

    def _ended(self, kind: str, last: Json, said: Said) -> list[str]:
        """The last chunk, with all log-probabilities, because the engine returns them at the end."""
        chunks = [event(last)]
        if self.request.stream_options.include_usage:
            chunks.append(event(self._head(kind) | {"choices": [], "usage": _usage(said)}))
        return [*chunks, "data: [DONE]\n\n"]


_UNFINISHED: Json = {"index": 0, "finish_reason": None, "stop_reason": None, "logprobs": None}
_CHUNK = "chat.completion.chunk"


class ChatAnswer(_Answer):
    def body(self, said: Said) -> Json:
        message: Json = {"role": "assistant", "content": said.text, "refusal": None, "annotations": []}
        if said.calls:
            calls = [{"id": c.id, "type": "function", "function": _function(c.name, c.json)} for c in said.calls]
            message |= {"content": said.text or None, "tool_calls": calls}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        choice = self._finished(said) | {"message": message}
        body = self._head("chat.completion") | {"choices": [choice], "usage": _usage(said)}
        return body | ({"prompt_token_ids": said.prompt} if self.request.return_token_ids else {})

    def opening(self, prompt: list[int]) -> list[str]:
        first = self._chunk({"role": "assistant", "content": ""})
        return [event(first | ({"prompt_token_ids": prompt} if self.request.return_token_ids else {}))]

    def piece(self, text: str) -> list[str]:
        return [event(self._chunk({"content": text}))]

    def closing(self, rest: str, said: Said) -> list[str]:
        """Tool calls come whole, once it is certain that they are well formed."""
        if not said.calls and not said.reasoning:
            return self._ended(_CHUNK, self._chunk({"content": rest}, self._finished(said)), said)
        deltas: list[Json] = [{"reasoning_content": said.reasoning}] if said.reasoning else []
        deltas += [{"content": rest}] if rest else []
        for n, call in enumerate(said.calls):
            begun = {"index": n, "id": call.id, "type": "function", "function": _function(call.name, "")}
            deltas += [
                {"tool_calls": [begun]},
                {"tool_calls": [{"index": n, "function": {"arguments": call.json}}]},
            ]
        chunks = [event(self._chunk(delta)) for delta in deltas]
        return chunks + self._ended(_CHUNK, self._chunk({}, self._finished(said)), said)

    def _chunk(self, delta: Json, choice: Json = _UNFINISHED) -> Json:
        return self._head(_CHUNK) | {"choices": [choice | {"delta": delta}]}

    def _finished(self, said: Said) -> Json:
        finish = "tool_calls" if said.calls and said.finish == "stop" else said.finish
        logprobs = None
        if said.tokens is not None:
            content = [_entry(t.text, t.logprob) | {"top_logprobs": [_entry(*e) for e in t.top]} for t in said.tokens]
            logprobs = {"content": content, "refusal": None}
        return self._choice(said, finish, logprobs)


class CompletionAnswer(_Answer):
    def body(self, said: Said) -> Json:
        choice = self._choice(said, said.finish, _legacy_logprobs(said.tokens)) | {"text": said.text}
        choice |= {"prompt_token_ids": said.prompt} if self.request.return_token_ids else {}
        return self._head("text_completion") | {"choices": [choice], "usage": _usage(said)}

    def opening(self, prompt: list[int]) -> list[str]:
        first = self._chunk("")
        if self.request.return_token_ids:
            first["choices"][0]["prompt_token_ids"] = prompt
        return [event(first)]

    def piece(self, text: str) -> list[str]:
        return [event(self._chunk(text))]

    def closing(self, rest: str, said: Said) -> list[str]:
        choice = self._choice(said, said.finish, _legacy_logprobs(said.tokens))
        return self._ended("text_completion", self._chunk(rest, choice), said)

    def _chunk(self, text: str, choice: Json = _UNFINISHED) -> Json:
        return self._head("text_completion") | {"choices": [choice | {"text": text}]}


def _function(name: str, arguments: str) -> Json:
    return {"name": name, "arguments": arguments}


def _usage(said: Said) -> Json:
    prompt, sampled = len(said.prompt), len(said.ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _legacy_logprobs(tokens: list[Token] | None) -> Json | None:
    if tokens is None:
        return None
    texts = [token.text for token in tokens]
    top = [dict(token.top) for token in tokens] if any(token.top for token in tokens) else None
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": top,
        "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
    }
