"""Rewards and advantages of a batch: what is known of every decision before the update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd.config import OptimiseConfig
from memopd.train.advantages import (
    explained_variance,
    gae,
    group_advantages,
    reference_penalty,
    token_rewards,
    whiten,
)
from memopd.train.batch import MiniBatch
from memopd.train.scoring import Scored


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
    task_reward = torch.tensor([e.reward for b in batches for e in b.episodes], dtype=old.dtype)
    call_reward = torch.as_tensor(np.concatenate([b.call_reward for b in batches]))
    penalty = reference_penalty(old, ref)
    summary = {"reward": float(task_reward.mean()), "reference_kl": float((old - ref).mean())}
    if o.algorithm == "ppo":
        reward = token_rewards(penalty, o.reference, last, task_reward, call_last, call_reward)
        advantage = gae(reward, value, last, o.gamma, o.gae_lambda)
        target = advantage + value
        summary["explained_variance"] = explained_variance(value, target)
    else:
        # Only what was earned is compared: penalties that differ by a trifle must not part a group that agrees.
        episode, group = owners(batches)
        earned = token_rewards(torch.zeros_like(penalty), 0.0, last, task_reward, call_last, call_reward)
        outcome = torch.zeros_like(task_reward).index_add(0, episode, earned)
        advantage = group_advantages(outcome, group, episode) - o.reference * penalty
        target = torch.zeros_like(advantage)  # of no critic
    summary["advantage_std"] = float(advantage.std()) if len(advantage) > 1 else 0.0
    if o.whiten and o.algorithm == "ppo":
        advantage = whiten(advantage)
    terms = [
        Terms(s.logp_old, a, s.value, t, torch.as_tensor(s.thinking))
        for s, a, t in zip(scored, advantage.split(sizes), target.split(sizes), strict=True)
    ]
    return terms, summary


def owners(batches: list[MiniBatch]) -> tuple[Tensor, Tensor]:
    """([D] the episode of each decision, [E] the task of each episode), counted over all mini-batches."""
    before = np.cumsum([0] + [len(b.episodes) for b in batches])
    episode = np.concatenate([b.episode + at for b, at in zip(batches, before, strict=False)])
    _, group = np.unique([e.task_id for b in batches for e in b.episodes], return_inverse=True)
    return torch.as_tensor(episode), torch.as_tensor(group)
