"""Rewards and advantages of a batch: what is known of every decision before the update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd.config import OptimiseConfig
from memopd.optimise.advantages import (
    explained_variance,
    gae,
    group_advantages,
    reference_penalty,
    token_rewards,
    whiten,
)
from memopd.optimise.batch import MiniBatch
from memopd.optimise.scoring import Scored


@dataclass(frozen=True, slots=True)
class Terms:
    """One mini-batch. All [D], on the CPU."""

    logp_old: Tensor
    advantage: Tensor
    value_old: Tensor
    target: Tensor  # of the critic
    thinking: Tensor  # bool


def make_terms(
    batches: list[MiniBatch], scored: list[Scored], o: OptimiseConfig
) -> tuple[list[Terms], dict[str, float]]:
    """Rewards, then advantages over the whole batch's decisions, then back to the mini-batches."""
    sizes = [len(b) for b in batches]
    old, ref, value = (torch.cat([getattr(s, f) for s in scored]) for f in ("logp_old", "logp_ref", "value"))
    last, call_last = (torch.as_tensor(np.concatenate([getattr(b, f) for b in batches])) for f in ("last", "call_last"))
    episodes = [e for b in batches for e in b.episodes]
    penalty = reference_penalty(old, ref)
    task_reward = torch.tensor([e.reward for e in episodes], dtype=torch.float32)
    call_reward = torch.tensor([c.reward for b in batches for c in b.calls], dtype=torch.float32)
    reward = token_rewards(penalty, o.reference, last, task_reward, call_last, call_reward)
    if o.advantages == "gae":
        advantage = gae(reward, value, last, o.gamma, o.gae_lambda)
        target = advantage + value
    else:
        offset = np.cumsum([0] + [len(b.episodes) for b in batches])
        owner = torch.as_tensor(np.concatenate([b.episode + at for b, at in zip(batches, offset, strict=False)]))
        returns = torch.zeros(len(episodes)).index_add(0, owner, reward)
        names = {task: n for n, task in enumerate(sorted({e.task_id for e in episodes}))}
        advantage = group_advantages(returns, torch.tensor([names[e.task_id] for e in episodes]), owner)
        target = advantage
    summary = {
        "reward": float(task_reward.mean()),
        "reference_kl": float((old - ref).mean()),
        "explained_variance": explained_variance(value, target) if o.advantages == "gae" else float("nan"),
        "advantage_std": float(advantage.std()) if len(advantage) > 1 else 0.0,
    }
    if o.whiten and o.advantages == "gae":
        advantage = whiten(advantage)
    terms = [
        Terms(s.logp_old, a, s.value, t, torch.as_tensor(s.thinking))
        for s, a, t in zip(scored, advantage.split(sizes), target.split(sizes), strict=True)
    ]
    return terms, summary
