"""Diagnostics of a run: quality, drift, sharing, and one console line per step."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from memopd.train import ranks
from memopd.train.batch import MiniBatch
from memopd.train.losses import TRUNCATION, importance_weights
from memopd.train.scoring import Scored
from memopd.train.source import AheadSampler, Sampler, Source, versions
from memopd.types import Episode

log = logging.getLogger("memopd")


def describe(episodes: list[Episode], batches: list[MiniBatch], scored: list[Scored]) -> dict[str, float]:
    calls = [c for b in batches for c in b.calls]
    kept = sum(len(b.episodes) for b in batches)
    found = {
        "episodes": float(len(episodes)),
        "left_out": float(len(episodes) - kept),
        "calls_per_episode": len(calls) / kept,
        "response_tokens": sum(len(c.completion) for c in calls) / len(calls),
        "rows_saved": 1 - sum(b.rows for b in batches) / sum(b.tokens for b in batches),
    }
    if all(c.logprobs is not None for c in calls):
        ours = torch.cat([s.logp_old for s in scored]).numpy()
        gap = np.abs(ours - np.concatenate([c.logprobs for c in calls]))
        found |= {"sampler_gap": float(gap.mean()), "sampler_gap_p99": float(np.quantile(gap, 0.99))}
    return found


def off_policy(source: Source, step: int, batches: list[MiniBatch], scored: list[Scored]) -> dict[str, float]:
    """With sampling.ahead: how old the policies were that sampled the calls, and the weights that correct for it."""
    if not isinstance(source, AheadSampler):
        return {}
    stale = [step - version for b in batches for version in versions(b.episodes)]
    old, sampled = torch.cat([s.logp_old for s in scored]), np.concatenate([b.logp_sampled for b in batches])
    weights = importance_weights(old, torch.as_tensor(sampled).to(old))
    return {
        "staleness": float(np.mean(stale)),
        "staleness_max": float(max(stale)),
        "importance_weight": float(weights.mean()),
        "truncated": float((weights == TRUNCATION).double().mean()),
        "sampled_again": float(len(source.outcomes)) if step in source.sampled_again else 0.0,
    }


def quality(source: Source, episodes: list[Episode]) -> dict[str, float]:
    """EM and F1 of the episodes that were sampled last. Recorded episodes have only a reward."""
    if not isinstance(source, Sampler):
        return {}
    outcomes = [source.outcomes[e.id] for e in episodes]
    return {"em": float(np.mean([o.em for o in outcomes])), "f1": float(np.mean([o.f1 for o in outcomes]))}


def dev_quality(source: Sampler, step: int) -> dict[str, float]:
    return {f"dev_{name}": value for name, value in quality(source, source.dev(step)).items()}


SHOWN = {
    "reward": "reward", "loss": "loss", "dev_loss": "dev loss", "em": "EM", "dev_em": "dev EM", "approx_kl": "KL",
    "clip_fraction": "clip", "entropy": "entropy", "loss_opd": "teacher KL", "sampler_gap": "gap",
    "staleness": "staleness", "importance_weight": "weight", "truncated": "truncated",
    "grad_norm": "grad", "tokens_per_second": "tokens/s",
}  # fmt: skip


def log_step(step: int, steps: int, metrics: dict[str, Any]) -> None:
    if ranks.rank() == 0:
        shown = [f"{name} {_short(metrics[key])}" for key, name in SHOWN.items() if key in metrics]
        log.info("  ".join([f"step {step + 1}/{steps}", *shown]))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def warn_left_out(reasons: list[str]) -> None:
    if ranks.rank() == 0:
        for why in reasons[:3]:
            log.warning("left out: %s", why)
        if len(reasons) > 3:
            log.warning("left out: %d more", len(reasons) - 3)
