"""The requests, answers, chunks and errors of OpenAI's API.

    POST body ── parse(ChatRequest, body) ──> ChatRequest ── prompt_ids ──> ids for the engine
                                                  └── answer ──> Answer ── body, or opening, chunk ..., closing

If a field would change how the engine samples, the gateway applies it or refuses it by name; it ignores no such field.
To add a route, add a request class and, if its answers look different, a class with the methods of `Answer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

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
from memopd.gateway.drift import Reply, chat_ids, encode
from memopd.types import Sampling

Json: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[str], None]

_COMPLETION_TOKENS = 16  # OpenAI's default for /completions; a chat may use all that the engine allows


class ApiError(Exception):
    """An error answer. The client gets `message`; the log gets the other fields, which never quote the client."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.cause = cause  # only for the log

    def body(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# Requests


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
        for name in fields:
            if name not in cls.model_fields:
                raise ValueError(f"{name[:60]!r} is not supported; leave it out")
        return fields


S = TypeVar("S", bound=Shape)


def parse(shape: type[S], body: object) -> S:
    """Validate a body. The ApiError for an invalid one names the field."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = schema.place(first["loc"])
        message = f"{where or 'the body'}: {schema.message(first)}"
        raise ApiError(400, "invalid_request", message, where or None) from None


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


def _joined(value: Any) -> Any:
    """Join OpenAI's list of text parts to one string."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in value):
        raise ValueError("must be a string or a list of text parts")
    return "".join(part["text"] for part in value)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be one text or one list of token ids")
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        raise ValueError("token ids must be between 0 and the size of the vocabulary")
    return tuple(value)


def _sampled_logprobs(value: Any) -> Any:
    if value is not False and (isinstance(value, bool) or value != 0):
        raise ValueError("must be 0: only the log-probabilities of the sampled tokens are available")
    return value is not False


def _only(default: Any) -> PlainValidator:
    """A field that is not implemented: only the value that changes nothing is allowed."""

    def check(value: Any) -> Any:
        if value != default:
            raise ValueError(f"is not supported; leave it out or send {default!r}")
        return value

    return PlainValidator(check)


Text = Annotated[str, AfterValidator(_unicode)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


class StreamOptions(Shape):
    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False


class Message(Shape):
    empty = [None, []]  # clients send answers back with `tool_calls: []`

    role: Text
    content: Annotated[Text, BeforeValidator(_joined)]
    name: Text | None = None


class GenerationRequest(Shape):
    """The fields that chats and completions share."""

    ignored = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
    )

    model: Text
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = 0  # -1 is vLLM's value for no limit
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stop: Annotated[tuple[Text, ...], FailFast(), BeforeValidator(_stops)] = ()
    include_stop_str_in_output: bool = False  # an extension of vLLM
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False  # an extension of vLLM
    logprobs: bool = False

    n: Annotated[Any, _only(1)] = 1
    best_of: Annotated[Any, _only(1)] = 1
    echo: Annotated[Any, _only(False)] = False
    suffix: Annotated[Any, _only("")] = ""
    logit_bias: Annotated[Any, _only({})] = None
    presence_penalty: Annotated[Any, _only(0)] = 0
    frequency_penalty: Annotated[Any, _only(0)] = 0
    repetition_penalty: Annotated[Any, _only(1)] = 1
    min_p: Annotated[Any, _only(0)] = 0
    top_logprobs: Annotated[Any, _only(0)] = 0
    tools: Annotated[Any, _only([])] = None
    functions: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none")] = None
    function_call: Annotated[Any, _only("none")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def sampling(self) -> Sampling:
        """Temperature 0 means the likeliest token, so it is sampled and recorded as top_k = 1."""
        if self.temperature == 0:
            return Sampling(top_k=1, max_tokens=self.token_limit)
        return Sampling(self.temperature, self.top_p, max(0, self.top_k), self.token_limit)

    def texts(self) -> Iterable[str]:
        """The texts of the prompt that have to be encoded."""
        raise NotImplementedError

    def prompt_ids(self, tokenizer: Any, replies: Sequence[Reply], check: Check) -> list[int]:
        """The ids that the model reads. `replies` are the earlier completions of the episode.

        `check` gets the text of the whole prompt before it is encoded.
        """
        raise NotImplementedError

    def answer(self, name: str, prompt: list[int]) -> Answer:
        """The answer to the call with this name."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Count | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def texts(self) -> Iterable[str]:
        return (message.content for message in self.messages)

    def prompt_ids(self, tokenizer: Any, replies: Sequence[Reply], check: Check) -> list[int]:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ApiError(400, "no_chat_template", "this model has no chat template: use /v1/completions", "messages")
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        if "developer" not in str(tokenizer.chat_template):  # most templates know only the role's older name
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        try:

            def check_all(text: str) -> None:
                check(text)
                _check_complete(messages, text)

            return chat_ids(tokenizer, messages, replies, check_all)
        except ApiError:
            raise
        except Exception as error:  # a template may raise any exception
            message = f"the chat template refuses these messages: {error}"
            raise ApiError(400, "chat_template", message, "messages") from None

    def answer(self, name: str, prompt: list[int]) -> Answer:
        return Answer(f"chatcmpl-{name}", self, prompt)


def _check_complete(messages: Sequence[Json], text: str) -> None:
    """Refuse a message that the chat template leaves out, as Qwen's does with roles that it does not know.

    Templates may shorten earlier replies and quote the results of tools, so these are not compared.
    """
    for n, message in enumerate(messages):
        role, place = message["role"], f"messages[{n}]"
        if role not in ("assistant", "tool", "function") and message["content"].strip() not in text:
            why = f"the chat template leaves out {place}: does it know the role {role[:60]!r}?"
            raise ApiError(400, "chat_template", why, place)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, PlainValidator(_prompt)]  # one text, or one list of token ids
    logprobs: Annotated[bool, BeforeValidator(_sampled_logprobs)] = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or _COMPLETION_TOKENS

    def texts(self) -> Iterable[str]:
        return (self.prompt,) if isinstance(self.prompt, str) else ()

    def prompt_ids(self, tokenizer: Any, replies: Sequence[Reply], check: Check) -> list[int]:
        if not isinstance(self.prompt, str):
            return list(self.prompt)
        check(self.prompt)
        return encode(tokenizer, self.prompt, special=True)

    def answer(self, name: str, prompt: list[int]) -> Answer:
        return Answer(f"cmpl-{name}", self, prompt)


class Outcome(Shape):
    """The reward that ends an episode."""

    reward: float
    task: Text | None = None


# Answers


@dataclass(frozen=True, slots=True)
class Completed:
    """The part of a completion that the client receives."""

    text: str
    finish: str
    ids: list[int]
    logprobs: list[tuple[str, float]] | None  # of each sampled token, after the text of that token alone


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's answer as a whole (`body`), or in chunks: `opening`, then `chunk`s, then `closing`."""

    id: str
    request: GenerationRequest
    prompt: list[int]
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, completed: Completed) -> Json:
        content = {"role": "assistant", "content": completed.text}
        choice = self._choice(completed) | ({"message": content} if self._chat else {"text": completed.text})
        return self._with_prompt(self._head("") | {"choices": [choice], "usage": self._usage(completed)})

    def opening(self) -> Json:
        return self._with_prompt(self.chunk("", {"role": "assistant"}))

    def chunk(self, text: str, first: Json | None = None) -> Json:
        return self._chunk({"index": 0, "finish_reason": None, "logprobs": None}, text, first or {})

    def closing(self, text: str, completed: Completed) -> list[Json]:
        """The last chunks. They have all log-probabilities, because the engine returns them at the end."""
        last = self._chunk(self._choice(completed), text, {})
        if not self.request.stream_options.include_usage:
            return [last]
        return [last, self._head(".chunk") | {"choices": [], "usage": self._usage(completed)}]

    @property
    def _chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def _head(self, chunk: str) -> Json:
        kind = f"chat.completion{chunk}" if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _chunk(self, choice: Json, text: str, first: Json) -> Json:
        content = {"delta": first | {"content": text}} if self._chat else {"text": text}
        return self._head(".chunk") | {"choices": [choice | content]}

    def _choice(self, completed: Completed) -> Json:
        logprobs = None if completed.logprobs is None else _logprobs(completed.logprobs, self._chat)
        choice: Json = {"index": 0, "finish_reason": completed.finish, "logprobs": logprobs}
        return choice | ({"token_ids": completed.ids} if self.request.return_token_ids else {})

    def _with_prompt(self, answer: Json) -> Json:
        """Add the prompt's ids where vLLM does: beside a chat's choices, and inside a completion's choice."""
        if self.request.return_token_ids:
            (answer if self._chat else answer["choices"][0])["prompt_token_ids"] = self.prompt
        return answer

    def _usage(self, completed: Completed) -> Json:
        prompt, sampled = len(self.prompt), len(completed.ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(sampled: list[tuple[str, float]], chat: bool) -> Json:
    if chat:
        content = [
            {"token": t, "logprob": p, "bytes": None if "\ufffd" in t else list(t.encode()), "top_logprobs": []}
            for t, p in sampled
        ]
        return {"content": content, "refusal": None}
    tokens = [token for token, _ in sampled]
    offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
    return {
        "tokens": tokens, "token_logprobs": [p for _, p in sampled], "top_logprobs": None, "text_offset": offsets,
    }  # fmt: skip
