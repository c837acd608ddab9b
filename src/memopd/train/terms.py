"""The credit of a step from the algorithm, and the other terms of every decision that are known before the update."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.train.advantages import explained_variance
from memopd.train.algorithms import SETTING, Algorithm, Credit, Experience, spread
from memopd.train.batch import Ints, MiniBatch
from memopd.train.later import Later, held, maybe_later, unknown
from memopd.train.metrics import is_ours
from memopd.train.scoring import Scored


@maybe_later("logp_old", "logp_ref")
@dataclass(frozen=True)
class Terms:
    """One mini-batch. All [D], on the CPU."""

    logp_old: Tensor  # without a reference it is unknown before the update, which sets it
    logp_ref: Tensor  # without a reference the same as logp_old
    advantage: Tensor
    value_old: Tensor
    target: Tensor  # of the critic; zeros without a critic
    thinking: Tensor  # bool

    def to(self, device: torch.device) -> Terms:
        """On another device, except for what is still unknown."""
        moved: list[Any] = [unknown(self, f.name) or getattr(self, f.name).to(device) for f in fields(self)]
        return Terms(*moved)


def make_terms(
    batches: list[MiniBatch], scored: list[Scored], algorithm: Algorithm
) -> tuple[list[Terms], dict[str, float]]:
    """Computes the credit of all decisions of the step and splits it by mini-batch. Also returns metrics of it."""
    experience = experience_of(batches, scored)
    credit = checked_credit(algorithm, algorithm.credit(experience), experience)
    advantage, target = credit.advantage, credit.target
    summary = {"reward": float(experience.task_reward.mean()), "reference_kl": _reference_kl(experience)}
    if target is not None:
        summary["explained_variance"] = explained_variance(experience.value, target)
    summary |= {"advantage_std": spread(advantage)} | credit.metrics
    target = torch.zeros_like(advantage) if target is None else target
    sizes = [len(b) for b in batches]
    terms = [
        Terms(held(s, "logp_old"), held(s, "logp_ref"), a, s.value, t, torch.as_tensor(s.thinking))
        for s, a, t in zip(scored, advantage.split(sizes), target.split(sizes), strict=True)
    ]
    return terms, summary


def experience_of(batches: list[MiniBatch], scored: list[Scored]) -> Experience:
    """All mini-batches as one, with consecutive numbers for episodes and calls."""
    old, ref = (_all(scored, f) for f in ("logp_old", "logp_ref"))
    value = torch.cat([s.value for s in scored])
    last, call_last = (torch.as_tensor(np.concatenate([getattr(b, f) for b in batches])) for f in ("last", "call_last"))
    _, group = np.unique([e.task_id for b in batches for e in b.episodes], return_inverse=True)
    return Experience(
        logp_old=old,
        logp_ref=ref,
        value=value,
        episode=_renumbered([b.episode for b in batches], [len(b.episodes) for b in batches]),
        call=_renumbered([b.call for b in batches], [len(b.calls) for b in batches]),
        last=last,
        call_last=call_last,
        task_reward=torch.tensor([e.reward for b in batches for e in b.episodes], dtype=value.dtype),
        call_reward=torch.as_tensor(np.concatenate([b.call_reward for b in batches])),
        group=torch.as_tensor(group),
    )


def _all(scored: list[Scored], field: str) -> Any:
    """A column of all mini-batches; unknown if one of them is."""

    def together() -> Tensor:
        return torch.cat([getattr(s, field) for s in scored])

    return Later(together) if any(unknown(s, field) for s in scored) else together()


def _reference_kl(experience: Experience) -> float:
    """Zero without a reference, whose log-probabilities are then those of π_old, known or not."""
    if unknown(experience, "logp_old") is not None:
        return 0.0
    return float((experience.logp_old - experience.logp_ref).mean())


def _renumbered(indices: list[Ints], sizes: list[int]) -> Tensor:
    before = np.cumsum([0, *sizes[:-1]])
    return torch.as_tensor(np.concatenate([index + at for index, at in zip(indices, before, strict=True)]))


def checked_credit(algorithm: Algorithm, credit: Credit, experience: Experience) -> Credit:
    """Check the result of a user's `credit` here, so that the error names the mistake. No gradient flows through it."""
    whose = f"{SETTING}: credit of {type(algorithm).__name__}"
    if not isinstance(credit, Credit):
        raise ValueError(f"{whose} must return memopd.train.algorithms.Credit, got {type(credit).__name__}")
    if credit.target is None and algorithm.needs_critic:
        raise ValueError(f"{whose} must give the critic's targets, Credit(advantage, target): needs_critic is true")
    for name, values in (("advantage", credit.advantage), ("target", credit.target)):
        if values is not None and not isinstance(values, Tensor):
            raise ValueError(f"{whose} must give {name} as a torch.Tensor, got {type(values).__name__}")
        if values is not None and not values.is_floating_point():
            raise ValueError(f"{whose} must give {name} as floating-point numbers, got {values.dtype}")
        if values is not None and values.shape != experience.value.shape:
            wanted, got = list(experience.value.shape), list(values.shape)
            raise ValueError(f"{whose} must give one {name} per sampled token, shape {wanted}, got {got}")
    for name, value in credit.metrics.items():
        if not isinstance(value, int | float):  # metrics.jsonl could not hold it
            raise ValueError(f"{whose} must give metrics as numbers, got {type(value).__name__} for {name!r}")
        if is_ours(name) and name != "advantage_std":  # which only an algorithm that whitens knows from before
            raise ValueError(f"{whose} must give another name to its metric {name!r}: MemOPD writes one of this name")
    target = None if credit.target is None else credit.target.detach()
    return replace(credit, advantage=credit.advantage.detach(), target=target)
