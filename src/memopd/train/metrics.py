"""Reads the metrics of a run, and names those that MemOPD writes.

It must not import torch, because `memopd report` needs no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopd.files import json_lines

OURS = frozenset({
    "step", "episodes", "reward", "em", "f1", "dev_em", "dev_f1", "loss", "dev_loss", "dev_perplexity", "loss_opd",
    "teacher_kl_think", "teacher_kl_action", "approx_kl", "clip_fraction", "reference_kl", "entropy", "grad_norm",
    "loss_ppo", "lr", "explained_variance", "loss_value", "advantage_std", "critic_grad_norm", "sampler_gap",
    "sampler_gap_p99", "staleness", "staleness_max", "importance_weight", "truncated", "sampled_again",
    "first_ratio_error", "calls_per_episode", "response_tokens", "rows_saved", "tokens_per_second", "left_out",
})  # fmt: skip


def is_ours(name: str) -> bool:
    """Whether MemOPD writes a metric of this name itself."""
    return name in OURS or name.startswith("seconds_")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read complete lines only, because a killed run may have left half a line."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    found = []
    for number, line in json_lines(file, finished=True):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{file}: line {number}: has no step; not written by memopd train or sft")
        found.append(line)
    return found
