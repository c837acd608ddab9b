"""The interface of an engine: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from memopd.types import Floats, Ids, Sampling, StopReason

Likeliest: TypeAlias = tuple[tuple[int, float], ...]  # ids and log-probabilities, the likeliest first

MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # stop strings per request, and characters of each


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call to sample.

    >>> Request(prompt=[5, 6, 7], seed=0, stop=("</search>",)).sampling.temperature
    1.0
    """

    prompt: Ids  # z_t
    seed: int  # of this request alone: other requests must not change its result
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()  # stop strings; the token in which one ends is kept whole
    episode: str = ""  # the episode that the request belongs to; scripted policies and logs read it
    purpose: str = ""  # Call.purpose; empty for the agent's actions
    grammar: str = ""  # that the text must follow (guide.py); empty: none
    top_logprobs: int = 0  # how many of the likeliest tokens to report at each position

    def __post_init__(self) -> None:
        name = f"episode {self.episode!r}: " if self.episode else ""
        if problem := stop_problem(self.stop):
            raise ValueError(f"{name}stop: {problem}")
        if self.top_logprobs < 0:
            raise ValueError(f"{name}top_logprobs must be 0 or more, got {self.top_logprobs}")


def stop_problem(stop: Sequence[str]) -> str:
    """What is wrong with these stop strings; empty if nothing is."""
    if isinstance(stop, str):  # it would be taken as one stop string per character
        return f"give a tuple of strings, such as ({stop!r},), not one string"
    if len(stop) > MAX_STOPS:
        return f"at most {MAX_STOPS} stop strings, got {len(stop)}"
    if not all(stop):
        return "a stop string must not be empty"
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_LENGTH:
        return f"at most {MAX_STOP_LENGTH} characters per stop string, got {longest}"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    tokens: Ids  # a_t, as sampled
    logprobs: Floats | None  # [|a_t|] under the sampling distribution; None: scripted, not sampled
    stop: StopReason
    policy_version: int = 0
    top: tuple[Likeliest, ...] = ()  # [|a_t|], where Request.top_logprobs asked for them


class Engine(Protocol):
    """Anything that samples. It returns completions in the order of the requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted request. `cancel` ends it early; the completion then holds the tokens so far, as aborted."""

    completion: Future[Completion]
    cancel: Callable[[], None]


class LiveEngine(Engine, Protocol):
    """An engine that also accepts requests at any time and from any thread, as a server needs it."""

    tokenizer: Any  # a Hugging Face tokenizer
    version: int  # of the policy; every completion carries the version that sampled it

    @property
    def max_length(self) -> int | None:
        """The most tokens of prompt and completion together; None if the engine does not know."""
        ...

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        """The engine's thread calls `on_token` with every id as soon as it is sampled."""
        ...

    def close(self) -> None: ...
