"""Measures an audit stage by stage, and its vocabulary pass against comparing the representations pair by pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from memopd.score import Head, head_of
from memopd.types import Episode
from memopd.verify.arms import PERSISTENT
from memopd.verify.audit import CORRUPTIONS, audit, temperatures
from memopd.verify.distance import CHUNK, measure
from memopd.verify.equivalence import MORE_PRECISE, at_precision, sampled_tokens


@dataclass(frozen=True, slots=True)
class AuditStage:
    name: str
    seconds: float
    cpu: float  # seconds of CPU, which other work on the machine changes little


@dataclass(frozen=True, slots=True)
class AuditResult:
    audited: str  # the model
    calls: int
    decisions: int
    rows: int  # of the packs
    audit_stages: tuple[AuditStage, ...]  # the last is the whole audit
    one_pass: AuditStage  # every row of logits computed once
    pair_by_pair: AuditStage  # the same comparisons, each with the logits of both sides

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_audit(name: str, model: Any, episodes: Sequence[Episode], attention: str = "auto") -> Iterator[AuditResult]:
    marks: list[tuple[str, float, float]] = []

    def progress(stage: str, items: Sequence[Any]) -> Iterable[Any]:
        marks.append((stage, time.perf_counter(), time.process_time()))
        return items

    progress("before", ())
    report = audit(model, episodes, attention, progress=progress)
    progress("end", ())
    stages = [AuditStage(a[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(marks)]
    whole = AuditStage("whole audit", marks[-1][1] - marks[0][1], marks[-1][2] - marks[0][2])
    calls = [c for e in episodes for c in e.calls]
    tokens, temperature = (f(episodes, model.device) for f in (_tokens, temperatures))
    states = {run: _states(model, len(tokens), seed) for seed, run in enumerate(("alone", *RUNS, "precise"))}
    head, exact = head_of(model), head_of(at_precision(model, MORE_PRECISE[model.dtype]))
    precise = states.pop("precise").to(exact.weight.dtype)
    alone = states.pop("alone")
    one = _timed("one pass", lambda: measure(head, alone, states, tokens, (exact, precise), temperature))
    pairs = _timed("pair by pair", lambda: _pair_by_pair(head, alone, states, tokens, exact, precise, temperature))
    yield AuditResult(name, len(calls), len(tokens), report.equivalence.rows, (*stages[1:], whole), one, pairs)


RUNS = ("packed", "batched", PERSISTENT, *CORRUPTIONS)


def _tokens(episodes: Sequence[Episode], device: torch.device) -> Tensor:
    return sampled_tokens([c for e in episodes for c in e.calls], device)


def _states(model: Any, decisions: int, seed: int) -> Tensor:
    """Random states: the time of a vocabulary pass does not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(decisions, head_of(model).weight.shape[1], generator=generator)
    return made.to(model.device, model.dtype)


def _timed(name: str, work: Callable[[], Any]) -> AuditStage:
    start, cpu = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return AuditStage(name, time.perf_counter() - start, time.process_time() - cpu)


@torch.no_grad()
def _pair_by_pair(
    head: Head, alone: Tensor, runs: dict[str, Tensor], tokens: Tensor, exact: Head, precise: Tensor, T: Tensor
) -> None:
    """How the audit compared until it had one pass: a row of its report each, the verdict's pairs, one memory rule."""
    for states in runs.values():
        _compare(head, states, head, alone, tokens, T)
    for run in ("packed", "batched", "packed"):
        _compare(head, runs[run], head, alone, tokens, T)
    for states in (runs["packed"], alone):
        _compare(head, states, exact, precise, tokens, T)
    max(float(head.logits(s).abs().max()) for s in alone.split(CHUNK))


def _compare(head: Head, states: Tensor, other_head: Head, other: Tensor, tokens: Tensor, T: Tensor) -> None:
    for at in range(0, len(tokens), CHUNK):
        part = slice(at, at + CHUNK)
        a, b = head.logits(states[part]).double(), other_head.logits(other[part]).double()
        (a - b).abs().amax(-1)
        a.argmax(-1) == b.argmax(-1)  # noqa: B015
        a, b, token = a / T[part, None], b / T[part, None], tokens[part, None]
        a.log_softmax(-1).gather(-1, token) - b.log_softmax(-1).gather(-1, token)
