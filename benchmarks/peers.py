"""Measures MemOPD beside its peers: the same calls, the same model, the same attention operator, one run.

Every arm computes log p of the same sampled tokens, and the gradient of their mean. The arms take turns, so that a
machine that slows down slows all of them. A smaller model in float32 gives each arm's largest error against every call
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.actor import LONG, needs_checkpointing
from benchmarks.peer_arms import ARMS, OURS, Ready, calls_of, missing
from memopd.models.attention import own_attention
from memopd.score import call_states, head_of, vocabulary_scores
from memopd.types import Episode

NOT_RUN = {
    "AReaL 1.0.4": "its metadata asks for torch>=2.9.1,<2.11 and transformers<=5.3.0",
    "verl 0.9.1": "its shared-prefix path is PrefixGrouper, which is measured",
}

CHECKED_LAYERS = 4  # of a shape, in the float32 check: rounding and mistakes show in few layers, and few are fast


@dataclass(frozen=True, slots=True)
class PeerArm:
    name: str
    rows: int  # that the layers compute, padding included
    build_seconds: float  # from recorded calls to tensors on the device
    seconds: float  # forward and backward
    spread: float
    peak_bytes: int  # in addition to weights and gradients, which every arm has
    error: float  # the largest |Δ log p| against each call alone, in float32
    note: str = ""  # why it did not run, or what differs


@dataclass(frozen=True, slots=True)
class PeersResult:
    peers_shape: str
    batch: int
    calls: int
    decisions: int
    tokens: int  # of prompts and completions
    checkpointing: bool
    checked: str  # the model of the float32 check
    baseline: str  # the fastest arm that is not ours
    arms: tuple[PeerArm, ...]
    not_run: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_peers(
    model: Any,
    check: Any,
    check_name: str,
    episodes: Sequence[Episode],
    shape: str,
    batch: int,
    repeats: int = 5,
    compiled: bool = False,
) -> PeersResult:
    """`model` is measured; `check` is a smaller one in float32, for the errors."""
    episodes = [replace(e, calls=kept) for e in episodes if (kept := tuple(c for c in e.calls if c.trainable))]
    calls = calls_of(episodes)
    tokens = sum(len(c.prompt) + len(c.completion) for c in calls)
    alone = _alone(check, episodes)
    errors = {name: _error(check, name, episodes, alone) for name in ARMS if not missing(name)}
    checkpointing = needs_checkpointing(model, tokens, compiled)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # transformers checkpoints only while training; there is no dropout to switch on
    else:
        model.gradient_checkpointing_disable()
        model.eval()
    arms = []
    taken = _measure(model, episodes, min(repeats, 3) if tokens > LONG else repeats, 1 if tokens > LONG else 2)
    for name, m in taken.items():
        error, why = errors.get(name, (float("nan"), ""))
        arms.append(PeerArm(name, m.rows, m.build, m.seconds, m.spread, m.peak, error, m.note or why))
    others = [a for a in arms if a.name != OURS and a.seconds == a.seconds]
    if not others:
        raise ValueError(f"{shape} × {batch}: no other arm ran: {arms[0].note}")
    return PeersResult(
        shape, batch, len(calls), sum(len(c.completion) for c in calls), tokens, checkpointing, check_name,
        min(others, key=lambda a: a.seconds).name, tuple(arms), NOT_RUN,
    )  # fmt: skip


# ---- time and memory ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Taken:
    """What was measured of one arm so far."""

    ready: Ready | None = None
    builds: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int = 0
    note: str = ""

    @property
    def rows(self) -> int:
        return 0 if self.ready is None else self.ready.rows

    @property
    def build(self) -> float:
        return median(self.builds) if self.builds else float("nan")

    @property
    def seconds(self) -> float:
        return median(self.times) if self.times else float("nan")

    @property
    def spread(self) -> float:
        return (max(self.times) - min(self.times)) / median(self.times) if self.times else float("nan")


def _measure(model: Any, episodes: Sequence[Episode], repeats: int, warmup: int) -> dict[str, _Taken]:
    """Build and warm up every arm, then time them in turn, `repeats` rounds after one that is not counted."""
    taken = {name: _Taken(note=missing(name)) for name in ARMS}
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    for name, arm in taken.items():
        if arm.note:
            continue
        try:
            for _ in range(3):
                seconds, ready = timed(lambda name=name: ARMS[name][0](model, episodes))  # type: ignore[misc]
                arm.builds.append(seconds)
            arm.ready = ready
            for _ in range(warmup):
                arm.peak, _ = _step(model, ready)
            arm.peak = max(0, arm.peak - weights)  # the gradients
        except Exception as why:  # others' code may raise anything; the other arms are measured all the same
            arm.note, arm.builds = _line(why), []
        _tidy(model)
    for _ in range(1 + repeats):
        for arm in taken.values():
            if arm.ready is None or arm.note:
                continue
            try:
                arm.times.append(_step(model, arm.ready)[1])
            except Exception as why:
                arm.note, arm.builds, arm.times = _line(why), [], []
                _tidy(model)
    _tidy(model)
    for arm in taken.values():
        arm.times = arm.times[1:]  # in the first round the allocator still looks for room
    return taken


def _line(error: Exception) -> str:
    """Why an arm did not run. Some errors, such as assertions, have no text."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:90]


def _step(model: Any, ready: Ready) -> tuple[int, float]:
    """One forward and backward pass: bytes at the peak, above those allocated before, and seconds."""
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation(ready.attention)
    before = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds, _ = timed(lambda: (-ready.logprobs().mean()).backward())
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return peak - before, seconds


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    done = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, done


def _tidy(model: Any) -> None:
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- errors ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _alone(model: Any, episodes: Sequence[Episode]) -> Tensor:
    """log p of the sampled tokens, each call by itself, with the model's own attention."""
    head = head_of(model, check=False)
    with own_attention(model):
        found = []
        for call in calls_of(episodes):
            states = call_states(model, call.path, len(call.prompt) - 1)
            token = torch.tensor(call.completion, device=states.device).long()
            found.append(vocabulary_scores(head, states, token).logprob)
    return torch.cat(found)


@torch.no_grad()
def _error(model: Any, name: str, episodes: Sequence[Episode], alone: Tensor) -> tuple[float, str]:
    """The largest |Δ log p| of an arm, or why there is none."""
    try:
        ready = ARMS[name][0](model, episodes)
        model.set_attn_implementation(ready.attention)
        return float((ready.logprobs() - alone).abs().max()), ""
    except Exception as why:
        return float("nan"), _line(why)
