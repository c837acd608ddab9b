"""Checks equivalence at a real model shape: logits and gradients, for every kernel and precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.shapes import episodes_of, random_model
from memopd.verify import EquivalenceReport, GradientReport, equivalence, gradient_equivalence


@dataclass(frozen=True, slots=True)
class RceResult:
    model: str
    shape: str
    logits: EquivalenceReport
    gradients: GradientReport | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_rce(
    model: str, shape: str, dtype: torch.dtype, attentions: list[str], device: str, gradients: bool
) -> Iterator[RceResult]:
    policy = random_model(model, dtype, device)
    policy.gradient_checkpointing_enable()  # five sets of gradients need the memory; the arithmetic is the same
    policy.train()
    calls = [c for e in episodes_of(shape) for c in e.calls]
    for attention in attentions:
        report = equivalence(policy, calls, attention, budget=10**9)
        slope = gradient_equivalence(policy, calls, attention, budget=10**9) if gradients else None
        yield RceResult(model, shape, report, slope)
