"""Checks which model families share rows, run unshared or are refused, and writes the table of docs/models.md."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from memopd.models.support import sharing
from memopd.types import Call
from memopd.verify.equivalence import equivalence, gradient_equivalence
from memopd.verify.families import FAMILIES, VOCABULARY, tiny_model


@dataclass(frozen=True, slots=True)
class FamilyRow:
    family: str
    mode: str  # shared, unshared or refused
    why: str
    attention: str  # the kernels that can run it
    logits: float  # max |Δlogit| / max |logit|, float64
    gradient: float  # relative, float64

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def example_calls(seed: int = 0, calls: int = 4) -> list[Call]:
    """A short MEM1-like interaction: [q] -> a0, [q, a0, o0] -> a1, [q, a1, o1] -> a2, ..."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> np.ndarray[Any, Any]:
        return rng.integers(3, VOCABULARY, n)

    q, memory, made = ids(20), ids(0), []
    for t in range(calls):
        made.append(Call(np.concatenate([q, memory, ids(10 if t else 0)]), ids(9)))
        memory = made[-1].completion
    return made


def check_families() -> Iterator[FamilyRow]:
    log = logging.getLogger("memopd")
    before = log.level
    log.setLevel(logging.ERROR)  # the table contains the notices
    try:
        for family in FAMILIES:
            yield check_family(family)
        yield _refused("phi3 (longrope)", 200)
    finally:
        log.setLevel(before)


def check_family(family: str) -> FamilyRow:
    model = tiny_model(family, dtype=torch.float64)
    share = sharing(model)
    worst: dict[str, tuple[float, float]] = {}
    refusal = "packed and independent differ"
    for attention in ("dense", "cascade"):
        try:
            logits = equivalence(model, example_calls(), attention)
            gradient = gradient_equivalence(model, example_calls(), attention)
        except ValueError as why:
            refusal = str(why)
            continue
        if logits.passed and gradient.passed:
            worst[attention] = logits.max_logit_error / logits.logit_scale, gradient.difference
    if not worst:
        return FamilyRow(family, "refused", refusal, "", float("nan"), float("nan"))
    mode, kernels = ("shared", ", ".join([*worst, "flex"])) if share.shared else ("unshared", "its own")
    return FamilyRow(
        family, mode, share.reason, kernels, max(w[0] for w in worst.values()), max(w[1] for w in worst.values())
    )


def _refused(family: str, length: int) -> FamilyRow:
    model = tiny_model(family, dtype=torch.float64)
    try:
        equivalence(model, [Call(np.full(length, 5), np.array([6, 7]))], "dense")
    except ValueError as why:
        return FamilyRow(f"{family}, a call of {length + 1}", "refused", str(why), "", float("nan"), float("nan"))
    raise AssertionError(f"{family} should have been refused at {length} tokens")


def markdown(rows: Sequence[FamilyRow]) -> str:
    lines = [
        "# Model families",
        "",
        "Made by `make models`: every family with tiny random weights in float64, a MEM1-like interaction packed",
        "against each call alone. *Logits* is the largest difference over the largest logit, *gradient* the relative",
        "difference over all parameters. Norms and rotary angles run in float32 inside every one of these models, and",
        "so do their gradients; Gemma 2's own softmax does too.",
        "",
        "| family | rows | kernels | logits | gradient |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        if r.mode == "refused":
            lines.append(f"| {r.family} | refused | | | |")
        else:
            lines.append(f"| {r.family} | {r.mode} | {r.attention} | {r.logits:.0e} | {r.gradient:.0e} |")
    lines += [
        "",
        "- **shared**: equal prefixes are computed once. `flex` needs a GPU and was not part of this check.",
        "- **unshared**: the model has layers that carry state through time, or does not use transformers' attention",
        "  interface. Its calls run one by one: exact, and no faster than without MemOPD.",
        "- **refused**: one clear line instead of a wrong number. "
        + " ".join(f"*{r.family}*: {r.why}." for r in rows if r.mode == "refused"),
    ]
    return "\n".join(lines) + "\n"
