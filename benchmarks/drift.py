"""Trains packed and unshared from one seed, and measures how far the two runs part, update by update.

Runs that differ by rounding sample other tokens at the first near tie, and then train on other data. So the unshared
run trains on the episodes that the packed run sampled, in its order, and log p of the same sampled tokens is compared
before every update: at the first the weights are equal and the difference is the layouts' rounding; later ones add what
the weights have drifted. A third run, unshared, samples by itself: its rewards stand beside the packed run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memopd.config import RunConfig
from memopd.train import traces
from memopd.train.metrics import read_metrics
from memopd.train.train import train

PACKED, REPLAYED, ALONE = "packed", "unshared-same-episodes", "unshared"


@dataclass(frozen=True, slots=True)
class DriftStep:
    """One update, on the same calls in both runs."""

    drift_step: int
    sampled: int  # tokens that were compared
    largest: float  # |Δ log p|
    p99: float
    mean: float
    packed_kl: float  # divergence from the teacher
    unshared_kl: float
    packed_norm: float  # of the gradient
    unshared_norm: float
    packed_reward: float
    alone_reward: float  # of the run that samples by itself
    packed_seconds: float
    unshared_seconds: float  # without sampling

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_drift(config: RunConfig, output: Path, steps: int, seed: int) -> Iterator[DriftStep]:
    """Run what is not there yet in `output`, then compare."""
    traces.EPISODES = 10**9  # of all episodes, not of a few for a report
    run = replace(config.run, seed=seed, check_every=0, dev_every=0, save_every=25, keep=1)
    packed = replace(config, run=run, optimise=replace(config.optimise, steps=steps, share=True))
    unshared = replace(packed, optimise=replace(packed.optimise, share=False))
    replayed = replace(unshared, sampling=replace(unshared.sampling, replay=str(output / PACKED / "episodes")))
    for name, arm in ((PACKED, packed), (REPLAYED, replayed), (ALONE, unshared)):
        if len(read_metrics(output / name)) < steps:
            train(arm, output / name, resume=(output / name / "config.json").is_file())
    yield from compared(output, steps)


def compared(output: Path, steps: int) -> Iterator[DriftStep]:
    lines = {name: read_metrics(output / name) for name in (PACKED, REPLAYED, ALONE)}
    for step in range(steps):
        ours, theirs = (
            traces.read_traces(output / name / "traces" / f"step-{step:06d}.parquet") for name in (PACKED, REPLAYED)
        )
        if list(ours) != list(theirs):
            raise ValueError(f"{output}: the runs trained on other calls in update {step + 1}: remove the folder")
        off = np.concatenate([np.abs(ours[call].logp_old - theirs[call].logp_old) for call in ours])
        packed, replayed = lines[PACKED][step], lines[REPLAYED][step]
        alone = lines[ALONE][step] if step < len(lines[ALONE]) else {}  # a stopped run is shown as far as it got
        yield DriftStep(
            step, len(off), float(off.max()), float(np.quantile(off, 0.99)), float(off.mean()),
            packed.get("loss_opd", float("nan")), replayed.get("loss_opd", float("nan")),
            packed.get("grad_norm", float("nan")), replayed.get("grad_norm", float("nan")),
            packed.get("reward", float("nan")), alone.get("reward", float("nan")),
            _update_seconds(packed), _update_seconds(replayed),
        )  # fmt: skip


def _update_seconds(line: dict[str, Any]) -> float:
    return float(sum(line.get(f"seconds_{stage}", 0.0) for stage in ("compile", "score", "advantages", "update")))
