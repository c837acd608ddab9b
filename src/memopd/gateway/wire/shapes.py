"""What the wire formats share: strict shapes of JSON objects, fields, and server-sent events.

If a field would change how the engine samples, a format applies it or refuses it by name; it ignores no such field.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from memopd import schema
from memopd.engine.protocol import stop_problem
from memopd.gateway.ask import ApiError, Ask, Json, Said, Tool
from memopd.gateway.tools import arguments_of, check_depth
from memopd.types import Sampling


class Shape(BaseModel):
    """A JSON object from a client. A null field counts as omitted, and an undeclared field is refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    empty: ClassVar[list[Any]] = [None]  # values that count as omitted in every field
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that do not change how the engine samples

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Report an unknown field at its object: logs show the place of an error, and the client chose the name."""
        if not isinstance(given, dict):
            return given
        fields = {name: value for name, value in given.items() if value not in cls.empty and name not in cls.ignored}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if cls.takes_any(given):
            return {name: value for name, value in fields.items() if name in known}
        for name in fields:
            if name not in known:
                raise ValueError(f"{name[:60]!r} is not supported; leave it out")
        return fields

    @classmethod
    def takes_any(cls, given: Json) -> bool:
        """Whether unknown fields of this object are dropped instead of refused."""
        return False


class Request(Protocol):
    """A request in one wire format."""

    @property
    def model(self) -> str: ...

    def ask(self) -> Ask: ...

    def answer(self, name: str) -> Answer:
        """The answer to the call with this name."""
        ...


class Answer(Protocol):
    """An answer in one wire format: as a whole, or as events."""

    call_ids: str  # what the ids of tool calls begin with

    def body(self, said: Said) -> Json: ...

    def opening(self, prompt: list[int]) -> list[str]: ...

    def piece(self, text: str) -> list[str]: ...

    def closing(self, rest: str, said: Said) -> list[str]:
        """The last events. `rest` is the text that no piece had."""
        ...

    def failure(self, error: ApiError) -> list[str]: ...


S = TypeVar("S", bound=BaseModel)


def parse(shape: type[S], body: object) -> S:
    """Validate a body. The ApiError for an invalid one names the field."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = schema.place(first["loc"])
        message = f"{where or 'the body'}: {schema.message(first)}"
        raise ApiError(400, "invalid_request", message, where or None) from None


def event(body: Json, name: str = "") -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def openai_error(error: ApiError) -> Json:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


# Fields


def _unicode(value: str) -> str:
    """JSON can express half a surrogate pair, which is no valid text for a tokenizer."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be a string of Unicode text") from None
    return value


def _stops(value: Any) -> Any:
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if not isinstance(stops, tuple) or not all(stops):
        raise ValueError("must be a string or a list of strings, none empty")
    if problem := stop_problem([s for s in stops if isinstance(s, str)]):
        raise ValueError(problem)
    return stops


def joined(*kinds: str) -> BeforeValidator:
    """A text, or a list of parts of these kinds that have a `text`."""

    def join(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not all(isinstance(p, dict) and p.get("type") in kinds and isinstance(p.get("text"), str) for p in value):
            raise ValueError("must be a string or a list of text parts")
        return "".join(part["text"] for part in value)

    return BeforeValidator(join)


def or_text(field: str) -> BeforeValidator:
    """An object, or in its place the text of this field."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)


def only(*harmless: Any) -> PlainValidator:
    """A field that is not implemented: only the values that change nothing are allowed."""

    def check(value: Any) -> Any:
        if value not in harmless:
            raise ValueError(f"is not supported; leave it out or send {harmless[0]!r}")
        return value

    return PlainValidator(check)


@cache
def _reserved() -> frozenset[str]:
    """The parameters of `apply_chat_template` that are no variables of the template. One of them is the template."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents"}


def _template_variables(value: Any) -> Any:
    if isinstance(value, dict) and (taken := _reserved() & value.keys()):
        raise ValueError(f"{min(taken)!r} is not a variable of the chat template")
    return value


def _encodable(value: dict[str, Any]) -> dict[str, Any]:
    check_depth(value)
    _unicode(json.dumps(value, ensure_ascii=False))
    return value


Text = Annotated[str, AfterValidator(_unicode)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Stops = Annotated[tuple[Text, ...], FailFast(), BeforeValidator(_stops)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]  # -1 is vLLM's value for no limit
Template = Annotated[dict[str, Any], BeforeValidator(_template_variables), AfterValidator(_encodable)]
Schema = Annotated[dict[str, Any], AfterValidator(_encodable)]


def sampling_of(temperature: float, top_p: float, top_k: int, limit: int | None) -> Sampling:
    """Temperature 0 means the likeliest token, so it is sampled and recorded as top_k = 1."""
    if temperature == 0:
        return Sampling(top_k=1, max_tokens=limit)
    return Sampling(temperature, top_p, max(0, top_k), limit)


class Function(Shape):
    """A tool's function. `strict` changes nothing: a call that is required follows its schema anyway, and one that is
    not required is sampled as any text."""

    ignored = frozenset({"strict", "defer_loading"})

    type: Literal["function"] = "function"  # only in responses; a chat has it beside the function
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    parameters: Schema = Field(default_factory=dict)

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters)


def chosen(tools: tuple[Tool, ...], name: str, param: str = "tool_choice") -> tuple[Tool, ...]:
    """The tool that a request names."""
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        raise ApiError(400, "invalid_request", f"{param}: no tool has this name", param)
    return found


def required(tools: tuple[Tool, ...], param: str = "tool_choice") -> tuple[Tool, ...]:
    if not tools:
        raise ApiError(400, "invalid_request", f"{param}: a tool is required, and `tools` is empty", param)
    return tools


def assistant_message(text: str, calls: list[tuple[str, str, str]]) -> Json:
    """An assistant's message for the chat template; `calls` are ids, names and arguments as text."""
    message: Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}
            for id, name, arguments in calls
        ]
    return message
