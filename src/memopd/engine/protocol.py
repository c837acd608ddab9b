"""What an engine is: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from memopd.types import Floats, Ids, Sampling, StopReason


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call to sample.

    >>> Request(prompt=[5, 6, 7], seed=0, stop=("</search>",)).sampling.temperature
    1.0
    """

    prompt: Ids  # z_t
    seed: int  # of this request alone: what ran beside it must not matter
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()  # strings; the token in which one ends is kept whole
    episode: str = ""  # who asks; scripted policies and logs read it
    purpose: str = ""  # what for, where it is not the agent's action: Call.purpose


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    tokens: Ids  # a_t, as sampled
    logprobs: Floats | None  # [|a_t|] of the distribution sampled from; None: not sampled but scripted
    stop: StopReason
    policy_version: int = 0


class Engine(Protocol):
    """Anything that samples. Completions come back in the order of the requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted request. `cancel` ends it early: what was sampled so far comes back as aborted."""

    completion: Future[Completion]
    cancel: Callable[[], None]


class LiveEngine(Engine, Protocol):
    """An engine that also takes requests at any time and from any thread, as a server needs it."""

    tokenizer: Any  # Hugging Face's
    version: int  # the policy's; every completion carries the version it was sampled with

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        """`on_token` is called with every sampled id as it comes, from the engine's thread."""
        ...

    def close(self) -> None: ...
