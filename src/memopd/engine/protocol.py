"""What an engine is: token ids in, sampled ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    tokens: Ids  # a_t, as sampled
    logprobs: Floats | None  # [|a_t|] of the distribution sampled from; None: not sampled but scripted
    stop: StopReason
    policy_version: int = 0


class Engine(Protocol):
    """Anything that samples. Completions come back in the order of the requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...
