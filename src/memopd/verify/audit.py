"""Measures how wrong other ways to train are: the paper's Table 3, Figure b, domain counts and teacher mismatch.

Every row scores the same recorded actions of the same episodes; independent calls are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.compile import Packed, compile_calls, corrupt, persistent_history, response_mask, trajectory_mask
from memopd.compile.controls import stable_prefix
from memopd.models.support import sharing
from memopd.score import Head, decision_states, head_of
from memopd.types import Call, Episode
from memopd.verify.arms import (
    FORK,
    OFFICIAL,
    PERSISTENT,
    REALIGN,
    Arm,
    CausalRuns,
    alone,
    arms_of,
    check_mem1,
    official_states,
    sequences_of,
    thoughts,
)
from memopd.verify.distance import CHUNK, Difference, Distance, Measured, Progress, measure, p99, silent
from memopd.verify.equivalence import (
    BUDGET,
    EquivalenceReport,
    batched_states,
    judge,
    packed_states,
    packs_of,
    precise_run,
    sampled_tokens,
    scattered,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One representation against independent calls."""

    representation: str
    p99_logprob: float
    max_logprob: float
    top1: float  # share
    top1_changed: int  # decisions
    false_clip: float  # share


@dataclass(frozen=True, slots=True)
class Domain:
    """The number of positions that each mask would train on."""

    sampled: int
    trajectory_spurious: int  # of all tokens after q in the flattened history
    response_spurious: int  # of all tokens in the assistant turns of all calls


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A model in exact states, compared with persistent states, in some of the calls."""

    calls: str
    decisions: int
    top1: float
    top1_changed: int
    p99_logprob: float
    mean_kl: float  # KL(exact ‖ persistent)


@dataclass(frozen=True, slots=True)
class RecordedGap:
    """The sampler's own log-probabilities, compared with the recomputed ones."""

    decisions: int
    mean: float  # of |Δ|
    p99: float
    k3: float  # (r − 1) − log r, r = recomputed / recorded: an estimate of KL(sampler ‖ trainer)


@dataclass(frozen=True, slots=True)
class Rule:
    """Packed compared with independent calls, for the episodes of one context-update rule."""

    memory: str
    episodes: int
    decisions: int
    p99_logprob: float
    max_logprob: float
    top1: float


@dataclass(frozen=True, slots=True)
class Audit:
    model: str
    episodes: int
    calls: int
    equivalence: EquivalenceReport
    representations: tuple[Row, ...]  # Table 3
    corruption: tuple[Row, ...]  # Figure b
    domain: Domain
    rounding: tuple[Row, ...] = ()  # against the calls alone at a higher precision; empty in float64
    arms: tuple[Arm, ...] = ()  # what other trainers do
    rules: tuple[Rule, ...] = ()  # Table 4
    student: tuple[Mismatch, ...] = ()  # by call
    teacher: tuple[Mismatch, ...] = ()
    recorded: RecordedGap | None = None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.equivalence.passed

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


@torch.no_grad()
def audit(
    model: Any,
    episodes: Sequence[Episode],
    attention: str = "auto",
    teacher: Any = None,
    name: str = "",
    progress: Progress = silent,
    tokenizer: Any = None,
) -> Audit:
    """Run every representation once, keep its states, and compare all of them in one pass over the vocabulary.

    With a tokenizer, the arms that encode text again or look for thoughts can do so.
    """
    episodes = [e for e in episodes if any(c.trainable for c in e.calls)]
    if not episodes:
        raise ValueError("there is no episode with a trainable call to audit")
    calls = [c for e in episodes for c in e.calls]
    packs = packs_of(calls, BUDGET)
    by = sequences_of(episodes, tokenizer)
    made = _Runs(model, episodes, calls, attention, progress, by)
    made.runs["packed"] = packed_states(model, calls, progress("packed", packs), attention, like=made.alone)
    made.run_arms(None if tokenizer is None else thoughts(tokenizer))
    made.run_corruptions()
    precise = precise_run(model, calls, progress)
    tokens, temperature = sampled_tokens(calls, made.alone.device), temperatures(episodes, made.alone.device)
    measured = measure(head_of(model), made.alone, made.runs, tokens, precise, temperature, progress, (PERSISTENT,))
    del precise  # its head is as large as the model's, or larger
    recorded, note = recorded_gap(episodes, measured.logprob)
    mismatch: tuple[Mismatch, ...] = ()
    if teacher is not None:
        try:
            mismatch = teacher_mismatch(teacher, episodes, attention, progress)
        except ValueError as why:
            made.notes.append(f"teacher: not measured: {why}")
    by[OFFICIAL] = by[PERSISTENT]  # the same rows, which see each other differently
    return Audit(
        model=name or type(model).__name__,
        episodes=len(episodes),
        calls=sum(c.trainable for c in calls),
        equivalence=judge(model, calls, packs, measured, attention),
        representations=_rows(
            measured.runs, {PERSISTENT: PERSISTENT, "batched": "batching floor", "packed": "reconstructed packing"}
        ),
        corruption=_rows(measured.runs, {what: what for what in CORRUPTIONS}),
        domain=domain(episodes),
        rounding=_rows(
            measured.rounding or {},
            {"alone": "calls alone", "batched": "batching floor", "packed": "reconstructed packing"},
        ),
        arms=arms_of(by, measured.runs, made.kept),
        rules=rules(episodes, measured.runs["packed"]),
        student=student_mismatch(episodes, measured),
        teacher=mismatch,
        recorded=recorded,
        notes=(*made.notes, *note),
    )


class _Runs:
    """The states of every run in the order of the calls. A run that is not possible leaves a note."""

    def __init__(
        self,
        model: Any,
        episodes: Sequence[Episode],
        calls: Sequence[Call],
        attention: str,
        progress: Progress,
        by: Mapping[str, Sequence[Packed]],
    ) -> None:
        self.model, self.episodes, self.calls = model, episodes, calls
        self.attention, self.progress, self.by = attention, progress, by
        single = alone(calls)
        self.causal = CausalRuns(model, [*single, *(s for sequences in by.values() for s in sequences)])
        self.alone = torch.cat([self.causal(s) for s in progress("calls alone", single)])
        batched = [batched_states(model, e.calls) for e in progress("calls in padded batches", episodes)]
        self.runs: dict[str, Tensor] = {"batched": torch.cat(batched)}
        self.kept: dict[str, Tensor] = {}  # [D] bool: the decisions that an arm computes, if not all
        self.notes: list[str] = []

    def control(self, what: str, items: Sequence[Any], states_of: Callable[[Any], Tensor]) -> None:
        """Run a way to score that may be impossible, for example past a rope limit."""
        try:
            self.runs[what] = torch.cat([states_of(item) for item in self.progress(what, items)])
        except ValueError as why:
            self.notes.append(f"{what}: not measured: {why}")

    def run_arms(self, hidden: Callable[[Any], int] | None) -> None:
        self.control(PERSISTENT, self.by[PERSISTENT], self.causal)
        for arm in (FORK, REALIGN):
            states = scattered(self.calls, self.progress(arm, self.by[arm]), self.causal, like=self.alone)
            ones = scattered(self.calls, self.by[arm], _ones, like=self.alone[:, :1].float())
            kept = ~ones.isnan()[:, 0]
            if not kept.any():
                self.notes.append(f"{arm}: not measured: it keeps none of the {len(kept):,} sampled tokens")
                continue
            self.kept[arm] = kept
            self.runs[arm] = torch.where(kept[:, None], states, self.alone)
        self.causal.states.clear()
        try:
            check_mem1(self.episodes)
        except ValueError as why:
            self.notes.append(f"{OFFICIAL}: not measured: {why}")
        else:
            self.control(OFFICIAL, self.episodes, lambda e: official_states(self.model, e, hidden))

    def run_corruptions(self) -> None:
        for what, wrong in CORRUPTIONS.items():
            self.control(what, self.episodes, partial(corrupted_states, self.model, self.attention, wrong))


def _ones(packed: Packed) -> Tensor:
    return torch.ones(len(packed.decisions), 1)


def _rows(runs: Mapping[str, Distance], names: Mapping[str, str]) -> tuple[Row, ...]:
    """The rows of the runs that were made, each with its name in the report."""
    shown = {run: title for run, title in names.items() if run in runs}
    return tuple(as_row(title, runs[run].as_sampled(), len(runs[run].same)) for run, title in shown.items())


CORRUPTIONS = {
    "visibility only": {"visibility": True},
    "positions only": {"positions": True},
    "both": {"visibility": True, "positions": True},
}


def as_row(representation: str, d: Difference, decisions: int) -> Row:
    changed = round((1 - d.top1) * decisions)
    return Row(representation, d.p99_logprob, d.max_logprob, d.top1, changed, d.false_clip)


def rules(episodes: Sequence[Episode], packed: Distance) -> tuple[Rule, ...]:
    """One row per memory rule of the recorded episodes."""
    sizes = [sum(len(c.completion) for c in e.calls if c.trainable) for e in episodes]
    made = []
    for memory in dict.fromkeys(e.memory for e in episodes):
        of_rule = [e.memory == memory for e in episodes]
        which = np.repeat(of_rule, sizes)
        d = packed.as_sampled(torch.as_tensor(which, device=packed.logit.device))
        made.append(Rule(memory or "not recorded", sum(of_rule), int(which.sum()), *_of(d)))
    return tuple(made)


def _of(d: Difference) -> tuple[float, float, float]:
    return d.p99_logprob, d.max_logprob, d.top1


def persistent_states(model: Any, episode: Episode) -> Tensor:
    """The flattened history as other trainers run it: one causal sequence with the model's own attention."""
    flat = persistent_history(episode)
    return CausalRuns(model, [flat])(flat)


def corrupted_states(model: Any, attention: str, wrong: Mapping[str, bool], episode: Episode) -> Tensor:
    if not sharing(model).shared:
        raise ValueError("the model runs its calls unshared, so there is no packed state to corrupt")
    return decision_states(model, corrupt(compile_calls(episode.calls), **wrong), attention)


def temperatures(episodes: Sequence[Episode], device: torch.device) -> Tensor:
    sizes = [sum(len(c.completion) for c in e.calls if c.trainable) for e in episodes]
    values = np.repeat([e.sampling.temperature for e in episodes], sizes)
    return torch.as_tensor(values, device=device, dtype=torch.float64)


def domain(episodes: Sequence[Episode]) -> Domain:
    sampled = trajectory = response = 0
    for episode in episodes:
        q = stable_prefix(episode)
        sampled += sum(len(c.completion) for c in episode.calls if c.trainable)
        trajectory += int(trajectory_mask(persistent_history(episode), q).sum())
        # A call that the memory rule made for itself may read less than q.
        response += sum(int(response_mask(c, min(q, len(c.prompt))).sum()) for c in episode.calls)
    return Domain(sampled, trajectory - sampled, response - sampled)


# The calls of an episode that a row of a mismatch is about, by their number from 0. Under MEM1's rule a flattened
# history is right for calls 0 and 1: until then, nothing was dropped. A mean over calls 1 and later hides the effect.
GROUPS = {
    "call 0": (0, 1),
    "call 1": (1, 2),
    "call 2": (2, 3),
    "call 3 and later": (3, None),
    "call 1 and later": (1, None),
    "call 2 and later": (2, None),
}


def student_mismatch(episodes: Sequence[Episode], measured: Measured) -> tuple[Mismatch, ...]:
    """The audited model itself in persistent states, by call; nothing if they could not be run."""
    if PERSISTENT not in measured.runs:
        return ()
    flat = measured.runs[PERSISTENT]
    assert flat.kl is not None
    return _by_call(np.concatenate([_call_of(e) for e in episodes]), flat.kl, flat.sampled_logprob, flat.same)


def teacher_mismatch(
    teacher: Any, episodes: Sequence[Episode], attention: str, progress: Progress
) -> tuple[Mismatch, ...]:
    """Before the first memory update both states are the same; after the second, the persistent one never occurred."""
    head = head_of(teacher)
    parts = []
    for episode in progress("teacher", episodes):
        exact = decision_states(teacher, compile_calls(episode.calls), attention)
        flat = persistent_states(teacher, episode)
        tokens = sampled_tokens(episode.calls, exact.device)
        parts.append(_divergence(head, exact, flat, tokens, episode.sampling.temperature))
    kl, delta, same = (torch.cat(column) for column in zip(*parts, strict=True))
    return _by_call(np.concatenate([_call_of(e) for e in episodes]), kl, delta, same)


def _call_of(episode: Episode) -> np.ndarray[Any, Any]:
    """[D] the number of each decision's call in its episode."""
    return np.repeat(np.arange(len(episode.calls)), [len(c.completion) * c.trainable for c in episode.calls])


def _by_call(call: np.ndarray[Any, Any], kl: Tensor, delta: Tensor, same: Tensor) -> tuple[Mismatch, ...]:
    """A row for every group of calls that has decisions. A group that says the same as one before is left out."""
    made: dict[bytes, Mismatch] = {}
    for name, (first, stop) in GROUPS.items():
        mask = (call >= first) & (call < (call.max() + 1 if stop is None else stop))
        if not mask.any() or mask.tobytes() in made:
            continue
        which = torch.as_tensor(mask, device=kl.device)
        here = same[which]
        share, changed = float(here.double().mean()), int((~here).sum())
        made[mask.tobytes()] = Mismatch(
            name, len(here), share, changed, p99(delta[which].abs()), float(kl[which].mean())
        )
    return tuple(made.values())


def _divergence(
    head: Head, exact: Tensor, flat: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    columns = []
    for at in range(0, len(tokens), CHUNK):
        part = slice(at, at + CHUNK)
        a = (head.logits(exact[part]).double() / temperature).log_softmax(-1)
        b = (head.logits(flat[part]).double() / temperature).log_softmax(-1)
        token = tokens[part, None]
        delta = (a.gather(-1, token) - b.gather(-1, token))[:, 0]
        columns.append(((a.exp() * (a - b)).sum(-1), delta, a.argmax(-1) == b.argmax(-1)))
    kl, delta, same = (torch.cat(column) for column in zip(*columns, strict=True))
    return kl, delta, same


def recorded_gap(episodes: Sequence[Episode], logprob: Tensor) -> tuple[RecordedGap | None, list[str]]:
    """Covers only calls whose log-probabilities were recorded, under the whole distribution.

    `logprob` has the recomputed ones of all trainable calls, at the sampling temperatures.
    """
    gaps, at, cut = [], 0, 0
    recomputed = logprob.cpu()
    for episode in episodes:
        whole = episode.sampling.is_whole
        for call in (c for c in episode.calls if c.trainable):
            mine = recomputed[at : at + len(call.completion)]
            at += len(call.completion)
            if call.logprobs is None:
                continue
            if not whole:
                cut += 1
                continue
            gaps.append(mine - torch.tensor(call.logprobs))
    notes = [f"{cut} calls were sampled with top-p or top-k: no recorded gap for them"] if cut else []
    if not gaps:
        return None, notes
    gap = torch.cat(gaps)
    return RecordedGap(len(gap), float(gap.abs().mean()), p99(gap.abs()), float((gap.expm1() - gap).mean())), notes
