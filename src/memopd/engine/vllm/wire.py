"""The wire format of vLLM servers: writes a request as JSON, and checks and parses an answer.

The route is vLLM's own for token ids, `/inference/v1/generate`. Unlike `/v1/completions`, it returns the id with every
log-probability, and the label of the weights that sampled every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd.engine.protocol import Likeliest, Request
from memopd.types import Floats, Ids, StopReason

GENERATE = "/inference/v1/generate"

_STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_COLDEST = 0.01  # vLLM silently samples at 0.01 for anything lower: the record would name another distribution
_NO_LOGPROB = -9999.0  # vLLM's value for NaN and minus infinity


class BadAnswer(Exception):
    """A server answered, but not with a completion. Another try may help."""


class Refused(Exception):
    """The request is wrong. Another try will not help."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


@dataclass(slots=True)
class Received:
    """The part of one completion that a server has sent so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)  # as many as were asked for
    stop: StopReason | None = None  # None: not finished
    label: str | None = None  # of the weights that sampled it, if the server reports one

    def take(self, choice: dict[str, Any]) -> list[int]:
        """Add one choice of an answer, or of one event of a stream. Returns its ids."""
        try:
            return self._take(choice)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadAnswer(f"not an answer: {error!r}") from error

    def _take(self, choice: dict[str, Any]) -> list[int]:
        ids = [int(i) for i in choice.get("token_ids") or []]
        entries = (choice.get("logprobs") or {}).get("content") or []
        if [e["token_id"] for e in entries] != ids:
            raise BadAnswer(f"{len(ids)} ids came with {len(entries)} log-probabilities, or with those of other ids")
        for entry in entries:
            if not math.isfinite(entry["logprob"]) or entry["logprob"] <= _NO_LOGPROB:
                raise BadAnswer(f"token {entry['token_id']} has log-probability {entry['logprob']}")
        self.tokens += ids
        self.top += [_likeliest(e) for e in entries]
        self.logprobs += [float(e["logprob"]) for e in entries]
        if reason := choice.get("finish_reason"):
            if reason not in _STOPS:
                raise BadAnswer(f"the server ended the request itself ({reason})")
            if not self.tokens:
                raise BadAnswer("an empty completion")
            labels = {span["version"] for span in choice.get("weight_versions") or []}
            if len(labels) > 1:
                raise BadAnswer(f"weights changed within the completion: {', '.join(sorted(labels))}")
            self.label = next(iter(labels), None)
            self.stop = _STOPS[reason]
        return ids

    def arrays(self) -> tuple[Ids, Floats]:
        return np.array(self.tokens, np.int32), np.array(self.logprobs, np.float64)


def _likeliest(entry: dict[str, Any]) -> Likeliest:
    given = [(int(e["token_id"]), float(e["logprob"])) for e in entry.get("top_logprobs") or []]
    return tuple(sorted((e for e in given if e[1] > _NO_LOGPROB), key=lambda e: -e[1]))


def body(request: Request, stream: bool) -> dict[str, Any]:
    """The JSON that asks for one completion.

    vLLM matches stop strings in the whole text, including special tokens, and keeps the token in which one ends whole:
    it cuts text, never ids.
    """
    sampling = request.sampling
    if sampling.temperature < _COLDEST:
        raise ValueError(f"vLLM samples at temperature {_COLDEST} at the lowest, got {sampling.temperature}")
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": int(request.seed) % 2**63,  # vLLM takes -1 for no seed, and seeds are signed 64-bit integers
        "logprobs": request.top_logprobs,  # 0: only of the sampled token
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if request.stop:
        parameters["stop"] = list(request.stop)
    if request.grammar:  # vLLM's `auto` takes llguidance for a grammar in Lark's form with JSON schemas
        parameters["structured_outputs"] = {"grammar": request.grammar}
    if sampling.max_tokens is not None:  # without it, the server samples to the end of its context
        parameters["max_tokens"] = int(sampling.max_tokens)
    prompt = np.asarray(request.prompt).tolist()
    return {"token_ids": prompt, "sampling_params": parameters, "stream": stream}


def check_end(request: Request, tokenizer: Any) -> None:
    """Refuse a prompt that ends inside a character, if there are stop strings.

    vLLM looks for stop strings in the text that it decodes after the prompt. If the prompt ends inside a character,
    that text includes the prompt, and a stop string in it would end the completion at once.
    """
    if request.stop and tokenizer.decode(list(request.prompt[-8:])).endswith("\ufffd"):
        raise ValueError(
            f"the prompt ends inside a character (ids {list(map(int, request.prompt[-3:]))}), where vLLM finds stop "
            "strings that are not there: end it at a whole one"
        )


def choice_of(answer: Any) -> dict[str, Any] | None:
    """The single choice of an answer or an event; None if it has none."""
    if not isinstance(answer, dict):
        raise BadAnswer("not a JSON object")
    if error := answer.get("error"):  # in a stream, whose status was 200 before the error
        raise failure(error.get("code") if isinstance(error, dict) else None, reason(answer))
    choices = answer.get("choices") or []
    return choices[0] if choices else None


def failure(status: Any, text: str) -> BadAnswer | Refused:
    """The error for an HTTP status. The status tells whether another try may help."""
    line = f"HTTP {status}: {' '.join(text.split())[:300]}"
    if not isinstance(status, int) or status >= 500 or status == 429:
        return BadAnswer(line)
    return Refused(line, status)


def reason(answer: Any) -> str:
    """The message in the body of an error."""
    message = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(message.get("message", message) if isinstance(message, dict) else message)
