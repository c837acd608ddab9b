"""Measures how wrong a trainer is that flattens: the paper's Table 3, Figure b, domain counts and teacher mismatch.

Every row scores the same recorded actions of the same episodes; independent calls are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from memopd.compile import compile_calls, corrupt, persistent_history, response_mask, trajectory_mask
from memopd.compile.controls import stable_prefix
from memopd.models.attention import own_attention
from memopd.models.support import check_length, sharing
from memopd.score import Head, call_states, decision_states, head_of
from memopd.types import Episode
from memopd.verify.equivalence import (
    BUDGET,
    CHUNK,
    Difference,
    Distance,
    EquivalenceReport,
    Progress,
    alone_states,
    batched_states,
    judge,
    measure,
    p99,
    packed_states,
    packs_of,
    precise_run,
    sampled_tokens,
    silent,
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
class TeacherMismatch:
    """The teacher in exact states, compared with persistent states."""

    when: str
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
    rules: tuple[Rule, ...] = ()  # Table 4
    teacher: tuple[TeacherMismatch, ...] = ()
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
) -> Audit:
    """Run every representation once, keep its states, and compare all of them in one pass over the vocabulary."""
    episodes = [e for e in episodes if any(c.trainable for c in e.calls)]
    if not episodes:
        raise ValueError("there is no episode with a trainable call to audit")
    calls = [c for e in episodes for c in e.calls]
    packs = packs_of(calls, BUDGET)
    head = head_of(model)
    alone = alone_states(model, calls, progress)
    batched = torch.cat([batched_states(model, e.calls) for e in progress("calls in padded batches", episodes)])
    runs = {"packed": packed_states(model, calls, progress("packed", packs), attention, like=alone), "batched": batched}
    notes: list[str] = []

    def control(what: str, states_of: Callable[[Episode], Tensor]) -> None:
        """Run a wrong way to score. If it cannot run, for example past a rope limit, there is a note instead."""
        try:
            runs[what] = torch.cat([states_of(e) for e in progress(what, episodes)])
        except ValueError as why:
            notes.append(f"{what}: not measured: {why}")

    control(PERSISTENT, lambda e: persistent_states(model, e))
    for what, wrong in CORRUPTIONS.items():
        control(what, lambda e, wrong=wrong: corrupted_states(model, e, attention, **wrong))  # type: ignore[misc]
    precise = precise_run(model, calls, progress)
    tokens, temperature = sampled_tokens(calls, alone.device), temperatures(episodes, alone.device)
    measured = measure(head, alone, runs, tokens, precise, temperature, progress)
    del precise  # its head is as large as the model's, or larger

    def rows(**names: str) -> tuple[Row, ...]:
        """The rows of the runs that were made, each with its name in the report."""
        shown = {run: title for run, title in names.items() if run in measured.runs}
        return tuple(as_row(title, measured.runs[run].as_sampled(), len(tokens)) for run, title in shown.items())

    recorded, note = recorded_gap(episodes, measured.logprob)
    mismatch: tuple[TeacherMismatch, ...] = ()
    if teacher is not None:
        try:
            mismatch = teacher_mismatch(teacher, episodes, attention, progress)
        except ValueError as why:
            notes.append(f"teacher: not measured: {why}")
    return Audit(
        model=name or type(model).__name__,
        episodes=len(episodes),
        calls=sum(c.trainable for c in calls),
        equivalence=judge(model, calls, packs, measured, attention),
        representations=rows(
            **{PERSISTENT: PERSISTENT, "batched": "batching floor", "packed": "reconstructed packing"}
        ),
        corruption=rows(**{what: what for what in CORRUPTIONS}),
        domain=domain(episodes),
        rules=rules(episodes, measured.runs["packed"]),
        teacher=mismatch,
        recorded=recorded,
        notes=(*notes, *note),
    )


PERSISTENT = "persistent history"
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
    check_length(model, len(flat))
    with own_attention(model):
        states = call_states(model, flat.tokens, 0)
    return states[torch.as_tensor(flat.decisions.row, device=states.device).long()]


def corrupted_states(model: Any, episode: Episode, attention: str, **wrong: bool) -> Tensor:
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


def teacher_mismatch(
    teacher: Any, episodes: Sequence[Episode], attention: str, progress: Progress
) -> tuple[TeacherMismatch, ...]:
    """Before the first memory update both states are the same; after it the persistent one never occurred."""
    head = head_of(teacher)
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"before the first update": [], "after it": []}
    for episode in progress("teacher", episodes):
        exact = decision_states(teacher, compile_calls(episode.calls), attention)
        flat = persistent_states(teacher, episode)
        tokens = sampled_tokens(episode.calls, exact.device)
        call = np.repeat(np.arange(len(episode.calls)), [len(c.completion) * c.trainable for c in episode.calls])
        first = torch.as_tensor(call == 0, device=exact.device)
        kl, delta, same = _divergence(head, exact, flat, tokens, episode.sampling.temperature)
        for when, which in zip(parts, (first, ~first), strict=True):
            parts[when].append((kl[which], delta[which], same[which]))
    mismatches = []
    for when, pieces in parts.items():
        kl, delta, same = (torch.cat(column) for column in zip(*pieces, strict=True))
        if len(kl):
            mismatches.append(
                TeacherMismatch(
                    when,
                    len(kl),
                    float(same.double().mean()),
                    int((~same).sum()),
                    p99(delta.abs()),
                    float(kl.mean()),
                )
            )
    return tuple(mismatches)


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


# ---- the printed report -------------------------------------------------------------------------------------------


def print_audit(report: Audit, console: Console) -> None:
    e = report.equivalence
    console.print(
        f"\n[bold]{report.model}[/bold], {e.dtype}, attention {e.attention}: {report.episodes} episodes, "
        f"{report.calls} calls, {e.decisions:,} sampled tokens; {e.rows:,} rows packed for {e.tokens:,} alone "
        f"({e.tokens / e.rows:.2f}×)\n"
    )
    console.print(_representations("Against independent calls", report.representations))
    if report.corruption:
        console.print(_representations("Exact rows with a corrupted state", report.corruption))
    rules = Table(title="Packed against independent calls, by context update", title_justify="left")
    for column in ("context update", "episodes", "tokens", "p99 |Δlog p|", "max |Δlog p|", "top-1 %"):
        rules.add_column(column, justify="left" if column == "context update" else "right")
    for r in report.rules:
        rules.add_row(
            r.memory, f"{r.episodes:,}", f"{r.decisions:,}", f"{r.p99_logprob:.3g}", f"{r.max_logprob:.3g}",
            f"{100 * r.top1:.2f}",
        )  # fmt: skip
    console.print(rules)
    domain = Table(title="Which tokens count as decisions", title_justify="left")
    domain.add_column("mask")
    domain.add_column("positions", justify="right")
    domain.add_column("spurious", justify="right")
    for mask, spurious in (
        ("sampled actions", 0),
        ("trajectory: all after q", report.domain.trajectory_spurious),
        ("response: all of the assistant turn", report.domain.response_spurious),
    ):
        domain.add_row(mask, f"{report.domain.sampled + spurious:,}", f"{spurious:,}")
    console.print(domain)
    if report.teacher:
        teacher = Table(title="Teacher: exact against persistent states", title_justify="left")
        for column in ("calls", "decisions", "top-1 %", "changed", "p99 |Δlog p|", "mean KL"):
            teacher.add_column(column, justify="left" if column == "calls" else "right")
        for t in report.teacher:
            teacher.add_row(
                t.when, f"{t.decisions:,}", f"{100 * t.top1:.2f}", f"{t.top1_changed:,}",
                f"{t.p99_logprob:.3g}", f"{t.mean_kl:.3g}",
            )  # fmt: skip
        console.print(teacher)
    if (gap := report.recorded) is not None:
        console.print(
            f"Recorded against recomputed log-probabilities, {gap.decisions:,} tokens: "
            f"mean |Δ| {gap.mean:.2e}, p99 {gap.p99:.2e}, k3 {gap.k3:.2e}"
        )
    for note in (*report.notes, *e.problems):
        console.print(f"[yellow]{note}[/yellow]")
    verdict = "[green]equivalent[/green]" if e.passed else "[red]NOT EQUIVALENT[/red]"
    console.print(
        f"Packing is {verdict}: error {e.error:.2e}, tolerance {e.tolerance:.2e} ({e.tolerance_source}); "
        f"worst at call {e.worst_call}, token {e.worst_position}",
        soft_wrap=True,
    )


def _representations(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("representation")
    for column in ("p99 |Δlog p|", "top-1 %", "changed", "false clip %"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.representation, f"{r.p99_logprob:.3g}", f"{100 * r.top1:.2f}", f"{r.top1_changed:,}",
            f"{100 * r.false_clip:.2f}",
        )  # fmt: skip
    return table
