"""What people look at: quality, drift, sharing, one console line a step."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from memopd.evaluate import measure_all
from memopd.optimise import ranks
from memopd.optimise.batch import MiniBatch
from memopd.optimise.scoring import Scored
from memopd.optimise.source import Sampler, Source
from memopd.record.rollout import codec_of
from memopd.types import Episode

log = logging.getLogger("memopd")


def describe(
    episodes: list[Episode], kept: list[Episode], batches: list[MiniBatch], scored: list[Scored]
) -> dict[str, float]:
    calls = [c for b in batches for c in b.calls]
    rows, tokens = sum(b.rows for b in batches), sum(b.tokens for b in batches)
    found = {
        "episodes": float(len(episodes)),
        "calls_per_episode": len(calls) / len(kept),
        "response_tokens": sum(len(c.completion) for c in calls) / len(calls),
        "rows_saved": 1 - rows / tokens,
    }
    if all(c.logprobs is not None for c in calls):
        gap = torch.cat([s.logp_old for s in scored]).numpy() - np.concatenate([c.logprobs for c in calls])
        found |= {"sampler_gap": float(np.abs(gap).mean()), "sampler_gap_p99": float(np.quantile(np.abs(gap), 0.99))}
    return found


def quality(source: Source, episodes: list[Episode], tokenizer: Any) -> dict[str, float]:
    """EM and F1 of what was sampled; recorded episodes have only their reward."""
    if not isinstance(source, Sampler):
        return {}
    decode, tasks = codec_of(tokenizer).decode, {t.id: t for t in source.tasks}
    asked = [tasks[i] for i in {e.task_id for e in episodes}]
    measured = measure_all(episodes, asked, decode, source.environment.grading)
    return {"em": float(np.mean([m.em for m in measured])), "f1": float(np.mean([m.f1 for m in measured]))}


def dev_quality(source: Sampler, step: int, tokenizer: Any) -> dict[str, float]:
    measured = measure_all(source.dev(step), source.dev_tasks, codec_of(tokenizer).decode, source.environment.grading)
    return {"dev_em": float(np.mean([m.em for m in measured])), "dev_f1": float(np.mean([m.f1 for m in measured]))}


def say(step: int, steps: int, m: dict[str, float]) -> None:
    if ranks.rank() != 0:
        return
    shown = [f"step {step + 1}/{steps}", f"reward {m['reward']:.3f}"]
    shown += [f"{name} {m[key]:.3g}" for name, key in (
        ("EM", "em"), ("dev EM", "dev_em"), ("KL", "approx_kl"), ("clip", "clip_fraction"), ("entropy", "entropy"),
        ("teacher KL", "teacher_kl"), ("gap", "sampler_gap"), ("grad", "grad_norm"), ("tokens/s", "tokens_per_second"),
    ) if key in m]  # fmt: skip
    log.info("  ".join(shown))


def warn_left_out(reasons: list[str]) -> None:
    if ranks.rank() == 0:
        for why in reasons[:3]:
            log.warning("left out: %s", why)
