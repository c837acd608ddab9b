"""The five types that every other module uses: what a model was asked, what it sampled, and in what order.

    Episode ── calls ──> Call ── prompt      z_t, every input id, in order
       │                  │  └── completion  a_t, the ids as sampled
       │                  ├── segments ──> Segment  where spans of the prompt came from
       │                  └── stop ──────> StopReason
       └── sampling ──> Sampling

Token ids in, token ids out: no type here holds text that would have to be encoded again. The constructors
check all values, so the rest of the code may trust them. The module imports only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float64]

_MAX_ID = np.iinfo(np.int32).max


class StopReason(StrEnum):
    """Why the sampler stopped."""

    STOP = "stop"  # a stop string or the end-of-sequence token
    LENGTH = "length"  # the token limit
    ABORTED = "aborted"  # the client disconnected or the engine failed: recorded, never trained on (Call.trainable)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution from which the completions were sampled.

    >>> Sampling(temperature=0.7).temperature
    0.7
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: the whole vocabulary
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < np.inf:
            raise ValueError(f"Sampling.temperature must be above 0 and finite, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling.top_p must be in (0, 1], got {self.top_p!r}")
        if self.top_k < 0:
            raise ValueError(f"Sampling.top_k must be 0 (off) or more, got {self.top_k!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"Sampling.max_tokens must be 1 or more, got {self.max_tokens!r}")

    @property
    def is_whole(self) -> bool:
        """Whether every token may be sampled. Training requires it: ratios need the policy's own probabilities."""
        return self.top_p == 1 and self.top_k == 0

    @property
    def restriction(self) -> str:
        """How the tokens were restricted; empty if any could be sampled.

        >>> Sampling(top_k=1).restriction
        'at temperature 0 (a top-k of 1)'
        """
        if self.is_whole:
            return ""
        return "at temperature 0 (a top-k of 1)" if self.top_k == 1 else "with top-p or top-k"

    @property
    def training_note(self) -> str:
        """What training will say about completions that were sampled so; empty for the default settings.

        >>> Sampling(top_p=0.9).training_note
        'training cannot use it: sampled with top-p or top-k, not from the whole distribution'
        >>> Sampling(temperature=0.01).training_note
        'training can use it only with sampling.temperature = 0.01'
        """
        if not self.is_whole:
            return f"training cannot use it: sampled {self.restriction}, not from the whole distribution"
        if self.temperature != 1:
            return f"training can use it only with sampling.temperature = {self.temperature}"
        return ""


@dataclass(frozen=True, slots=True)
class Segment:
    """The origin of prompt[start:stop]. Only the flattened controls and the report read it.

    >>> Segment("memory", start=350, stop=430, source=0)  # retained from call 0
    Segment(kind='memory', start=350, stop=430, source=0)
    """

    kind: str  # "prefix" (q), "memory" (retained), "observation" (new)
    start: int
    stop: int
    source: int | None = None  # the call that sampled the memory, or whose action led to the observation

    def __post_init__(self) -> None:
        if self.kind not in ("prefix", "memory", "observation"):
            raise ValueError(f"Segment.kind must be prefix, memory or observation, got {self.kind!r}")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"Segment must have 0 <= start <= stop, got {self.start}..{self.stop}")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call: the exact ids it read and the exact ids it sampled.

    >>> call = Call(prompt=[5, 6, 7], completion=[8, 9], logprobs=[-0.1, -2.3])
    >>> len(call.prompt), len(call.completion), call.reward
    (3, 2, 0.0)
    """

    prompt: Ids  # [|z_t|], never empty
    completion: Ids  # [|a_t|], never empty
    logprobs: Floats | None = None  # [|a_t|], under the sampling distribution
    stop: StopReason | None = None
    reward: float = 0.0  # r_t of equation 1
    trainable: bool = True  # False: the call gives context only, and nothing is learnt from it
    purpose: str = ""
    policy_version: int = 0
    segments: tuple[Segment, ...] = ()
    name: str = field(default="call", repr=False)  # its name in error messages; not part of its value

    def __post_init__(self) -> None:
        prompt = _ids(self.prompt, self.name, "prompt")
        completion = _ids(self.completion, self.name, "completion")
        _set(self, "prompt", prompt)
        _set(self, "completion", completion)
        if self.logprobs is not None:
            _set(self, "logprobs", _logprobs(self.logprobs, len(completion), self.name))
        if self.stop is not None:
            if self.stop not in list(StopReason):
                raise ValueError(f"{self.name}: stop: must be stop, length or aborted, got {self.stop!r}")
            _set(self, "stop", StopReason(self.stop))
        if not isinstance(self.trainable, bool | np.bool_):
            raise ValueError(f"{self.name}: trainable: must be true or false, got {self.trainable!r}")
        if self.stop is StopReason.ABORTED:
            _set(self, "trainable", False)
        if not _finite(self.reward):
            raise ValueError(f"{self.name}: reward: must be a finite number, got {self.reward!r}")
        _set(self, "segments", tuple(self.segments))
        for segment in self.segments:
            if segment.stop > len(prompt):
                raise ValueError(f"{self.name}: segments: {segment} ends past the prompt of {len(prompt)} ids")

    @property
    def path(self) -> Ids:
        """The ids that the model reads: the prompt and every sampled token but the last, which predicts nothing."""
        return np.concatenate([self.prompt, self.completion[:-1]])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Call):
            return NotImplemented
        return all(_same(getattr(self, f), getattr(other, f)) for f in _CALL_FIELDS)

    __hash__ = None  # type: ignore[assignment]  # holds arrays


@dataclass(frozen=True, slots=True)
class Episode:
    """The ordered calls of one interaction. Episodes with one `task_id` form a group.

    >>> Episode("e0", "task-7", [Call([1, 2], [3]), Call([1, 3, 4], [5])], reward=1.0).calls[1].prompt
    array([1, 3, 4], dtype=int32)
    """

    id: str
    task_id: str
    calls: tuple[Call, ...]
    reward: float = 0.0  # the task's outcome, paid on the last sampled token
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    started: float | None = None  # Unix seconds
    ended: float | None = None
    memory: str = ""  # the context-update rule U, where known

    def __post_init__(self) -> None:
        _set(self, "calls", tuple(self.calls))
        if not self.id or not isinstance(self.id, str):
            raise ValueError(f"Episode.id must be a non-empty string, got {self.id!r}")
        if not isinstance(self.task_id, str):
            raise ValueError(f"episode {self.id!r}: task_id: must be a string, got {self.task_id!r}")
        if not self.calls:
            raise ValueError(f"episode {self.id!r}: calls: must not be empty")
        if wrong := [c for c in self.calls if not isinstance(c, Call)]:
            raise ValueError(f"episode {self.id!r}: calls: must be Call, got {type(wrong[0]).__name__}")
        if not _finite(self.reward):
            raise ValueError(f"episode {self.id!r}: reward: must be a finite number, got {self.reward!r}")

    @property
    def actions(self) -> tuple[Call, ...]:
        """The calls in which the agent acted. Other calls have a purpose, such as a note that the memory rule wrote.

        >>> len(Episode("e0", "t", [Call([1], [2]), Call([3], [4], purpose="note"), Call([1, 4], [5])]).actions)
        2
        """
        return tuple(call for call in self.calls if not call.purpose) or self.calls  # all, where every call has one


_CALL_FIELDS = [f.name for f in fields(Call) if f.name != "name"]


def _set(obj: object, name: str, value: object) -> None:
    object.__setattr__(obj, name, value)  # a frozen dataclass allows no other way


def _ids(values: Sequence[int] | Ids, name: str, which: str) -> Ids:
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        raise ValueError(f"{name}: {which}: must be one flat list of token ids") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: {which}: must be one flat list of token ids, got shape {array.shape}")
    if len(array) == 0:
        raise ValueError(f"{name}: {which}: must not be empty")
    # A list of Python values may contain a bool or a float among the integers, which NumPy would promote.
    mixed = not isinstance(values, np.ndarray) and any(isinstance(v, bool | np.bool_) for v in values)
    if array.dtype.kind not in "iu" or mixed:
        raise ValueError(f"{name}: {which}: token ids must be integers, got {_culprit(values)!r}")
    if array.min() < 0:
        raise ValueError(f"{name}: {which}: negative token id {array.min()} at {int(array.argmin())}")
    if array.max() > _MAX_ID:
        raise ValueError(f"{name}: {which}: token id {array.max()} does not fit 31 bits")
    return _frozen(array, np.int32)


def _logprobs(values: Sequence[float] | Floats, length: int, name: str) -> Floats:
    try:
        array = _frozen(np.asarray(values), np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: logprobs: must be one flat list of numbers") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: logprobs: must be one flat list of numbers, got shape {array.shape}")
    if len(array) != length:
        raise ValueError(f"{name}: logprobs: {len(array)} given for {length} sampled tokens")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: logprobs: not finite at {int(np.flatnonzero(~np.isfinite(array))[0])}")
    return array


def _frozen(array: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    """A read-only copy, unless the array is read-only already, so that no caller can change a recorded call."""
    if array.dtype == dtype and not array.flags.writeable and array.flags.c_contiguous:
        return array
    array = np.array(array, dtype=dtype)
    array.flags.writeable = False
    return array


def _finite(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def _culprit(values: Any) -> Any:
    integers = int | np.integer
    wrong = [v for v in values if not isinstance(v, integers) or isinstance(v, bool | np.bool_)]
    return wrong[0] if wrong else max(values)  # an integer too large for NumPy


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a is b or bool(a == b)
