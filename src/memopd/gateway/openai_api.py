"""The shapes of OpenAI's API: what a request may ask, how an answer, a chunk and an error look.

A field that would change what is sampled is honoured or refused by name, never ignored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memopd.types import Sampling

Json: TypeAlias = dict[str, Any]

_COMPLETION_TOKENS = 16  # OpenAI's default for /completions; a chat goes on to the engine's limit
_SEEDS = 1 << 63

# Fields we do not implement, with the value that asks for nothing.
_IDLE: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "top_logprobs": 0,
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
# Fields that say who asks, and change nothing of what is sampled.
_NOTES = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}


class ApiError(Exception):
    """An answer that is an error. `message` goes to the client; logs get the rest, which has no words of the client."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.cause = cause  # for the log alone

    def body(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, checked."""

    model: str
    chat: bool
    messages: tuple[dict[str, str], ...] = ()  # of a chat
    prompt: str | tuple[int, ...] = ""  # of a completion
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    keep_stop: bool = False  # vLLM's include_stop_str_in_output
    stream: bool = False
    usage: bool = False  # at the end of a stream
    logprobs: bool = False
    token_ids: bool = False  # vLLM's return_token_ids


def asked(body: object, chat: bool) -> Asked:
    """The request that a JSON body makes, or an ApiError that names the field."""
    if not isinstance(body, dict):
        raise _wrong(None, "the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    take = _Taker(given)
    result = Asked(
        model=take("model", text),
        chat=chat,
        messages=take("messages", _messages) if chat else (),
        prompt="" if chat else take("prompt", _prompt),
        sampling=_sampling(take, chat),
        seed=take("seed", _seed, None),
        stop=take("stop", _stop, ()),
        keep_stop=take("include_stop_str_in_output", _flag, False),
        stream=take("stream", _flag, False),
        usage=take("stream_options", _stream_options, False),
        logprobs=take("logprobs", _flag if chat else _sampled_logprobs, False),
        token_ids=take("return_token_ids", _flag, False),
    )
    for name, value in given.items():
        if name in _NOTES or name in take.taken or (name in _IDLE and value == _IDLE[name]):
            continue
        if name in _IDLE:
            raise _wrong(name, f"is not supported here; leave it out or send {_IDLE[name]!r}")
        raise ApiError(400, "unknown_field", f"{name[:60]!r}: unknown field; it would be ignored, so it is refused")
    return result


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's answer in the shape that was asked for."""

    id: str
    asked: Asked
    prompt: list[int]
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, text: str, finish: str, ids: list[int], logprobs: Json | None) -> Json:
        choice: Json = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        answer = self._head(streamed=False) | {"choices": [choice], "usage": self._usage(ids)}
        if self.asked.token_ids:
            choice["token_ids"] = ids
            (answer if self.asked.chat else choice)["prompt_token_ids"] = self.prompt
        return answer

    def opening(self) -> Json:
        """A stream's first chunk."""
        chunk = self.chunk("", role=True)
        if self.asked.token_ids:
            (chunk if self.asked.chat else chunk["choices"][0])["prompt_token_ids"] = self.prompt
        return chunk

    def chunk(self, text: str, role: bool = False) -> Json:
        choice: Json = {"index": 0, "finish_reason": None, "logprobs": None}
        if self.asked.chat:
            choice["delta"] = ({"role": "assistant"} if role else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._head(streamed=True) | {"choices": [choice]}

    def closing(self, text: str, finish: str, ids: list[int], logprobs: Json | None) -> list[Json]:
        """A stream's last chunks. The engine gives log-probabilities at the end, so all of them come here."""
        chunk = self.chunk(text)
        chunk["choices"][0] |= {"finish_reason": finish, "logprobs": logprobs}
        if self.asked.token_ids:
            chunk["choices"][0]["token_ids"] = ids
        if not self.asked.usage:
            return [chunk]
        return [chunk, self._head(streamed=True) | {"choices": [], "usage": self._usage(ids)}]

    def _head(self, streamed: bool) -> Json:
        kind = "text_completion" if not self.asked.chat else "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _usage(self, ids: list[int]) -> Json:
        read, sampled = len(self.prompt), len(ids)
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def logprobs_of(tokens: list[str], logprobs: list[float], chat: bool) -> Json:
    """Of the sampled tokens, each with the text it decodes to by itself."""
    if chat:
        content = [
            {"token": t, "logprob": p, "bytes": None if "\ufffd" in t else list(t.encode()), "top_logprobs": []}
            for t, p in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets[:-1]}


class _Taker:
    """Takes fields out of a body one by one, so that what is left over is known."""

    def __init__(self, given: Json) -> None:
        self._given = given
        self.taken: set[str] = set()

    def __call__(self, name: str, check: Callable[[str, Any], Any], *default: Any) -> Any:
        self.taken.add(name)
        if name in self._given:
            return check(name, self._given[name])
        if not default:
            raise _wrong(name, "is missing")
        return default[0]


def _wrong(name: str | None, message: str) -> ApiError:
    return ApiError(400, "invalid_request", f"{name}: {message}" if name else message, name)


def _sampling(take: _Taker, chat: bool) -> Sampling:
    """Temperature 0 asks for the likeliest token: top-k of one, recorded as that."""
    limits = [take(name, _count, None) for name in (["max_completion_tokens"] if chat else []) + ["max_tokens"]]
    limit = next((n for n in limits if n is not None), None if chat else _COMPLETION_TOKENS)
    temperature = take("temperature", _temperature, 1.0)
    top_p, top_k = take("top_p", _top_p, 1.0), take("top_k", _top_k, 0)
    if temperature == 0:
        return Sampling(top_k=1, max_tokens=limit)
    return Sampling(temperature, top_p, top_k, limit)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _encodable(value):
        raise _wrong(name, "must be a string of Unicode text")
    return value


def _encodable(value: str) -> bool:
    """JSON can spell half a surrogate pair, which no text holds and no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "must be true or false")
    return value


def _integer(name: str, value: Any, least: int, below: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
        raise _wrong(name, f"must be a whole number from {least} to {below - 1}")
    return value


def number(name: str, value: Any, fits: Callable[[float], bool] = math.isfinite, what: str = "that is finite") -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that no float holds
            if math.isfinite(value) and fits(value):
                return float(value)
    raise _wrong(name, f"must be a number {what}")


def _count(name: str, value: Any) -> int:
    return _integer(name, value, 1, 1 << 31)


def _seed(name: str, value: Any) -> int:
    return _integer(name, value, 0, _SEEDS)


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(name, value, -1, 1 << 31))  # -1: vLLM's word for all


def _temperature(name: str, value: Any) -> float:
    return number(name, value, lambda t: t >= 0, "of 0 or more")


def _top_p(name: str, value: Any) -> float:
    return number(name, value, lambda p: 0 < p <= 1, "above 0 and at most 1")


def _sampled_logprobs(name: str, value: Any) -> bool:
    if value is not False and (isinstance(value, bool) or value != 0):
        raise _wrong(name, "only those of the sampled tokens are known: 0 asks for them")
    return value is not False


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(stops):
        raise _wrong(name, "must be a string or a list of strings, none empty")
    return tuple(text(name, stop) for stop in stops)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, Mapping) or not value.keys() <= {"include_usage", "include_obfuscation"}:
        raise _wrong(name, "must be an object; include_usage is known")
    return _flag(f"{name}.include_usage", value.get("include_usage", False))


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        return text(name, value)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise _wrong(name, "must be one text or one list of token ids")
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        raise _wrong(name, "token ids must be between 0 and the size of the vocabulary")
    return tuple(value)


def _messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, "must be a list of messages, not empty")
    return tuple(_message(f"{name}[{i}]", message) for i, message in enumerate(value))


def _message(name: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(name, "must be an object with role and content")
    given = {key: value for key, value in message.items() if value is not None and value != []}
    if unknown := sorted(given.keys() - {"role", "content", "name"}):
        raise ApiError(400, "unknown_field", f"{name}: {unknown[0][:60]!r} is not supported here", name)
    taken = {key: text(f"{name}.{key}", given[key]) for key in ("role", "name") if key in given}
    if "role" not in taken:
        raise _wrong(f"{name}.role", "is missing")
    return taken | {"content": _content(f"{name}.content", given.get("content"))}


def _content(name: str, value: Any) -> str:
    """A string, or OpenAI's list of text parts."""
    if isinstance(value, str):
        return text(name, value)
    if not isinstance(value, list) or not all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        raise _wrong(name, "must be a string or a list of text parts")
    return "".join(text(f"{name}.text", part.get("text")) for part in value)
