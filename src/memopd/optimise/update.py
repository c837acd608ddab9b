"""One optimiser step of the actor and of the critic on a mini-batch, whatever packs and ranks it is spread over."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from memopd.config import OptimiseConfig
from memopd.optimise import ranks
from memopd.optimise.batch import MiniBatch
from memopd.optimise.learner import Learner
from memopd.optimise.losses import (
    approximate_kl,
    clip_fraction,
    distillation_loss,
    entropy_bonus,
    policy_loss,
    value_loss,
)
from memopd.optimise.models import PolicyRoot, ValueRoot
from memopd.optimise.scoring import Guide
from memopd.optimise.terms import Terms


def update(
    learner: Learner, batches: list[MiniBatch], terms: list[Terms], guides: list[Guide | None], step: int
) -> dict[str, float]:
    """PPO epochs over the mini-batches. The means over them are reported, the first ratio error by itself."""
    o, config = learner.config.optimise, learner.config
    lr = learning_rate(o.lr, step, o.steps, o.warmup, o.schedule)
    set_learning_rate(learner.actor_optimiser, lr)
    if learner.critic_optimiser is not None:
        rate = learning_rate(o.critic_lr, step, o.steps, o.critic_warmup, o.schedule)
        set_learning_rate(learner.critic_optimiser, rate)
    made: list[dict[str, float]] = []
    for epoch in range(o.epochs):
        for i in np.random.default_rng([config.run.seed, step, epoch]).permutation(len(batches)):
            batch, known = batches[i], terms[i]
            measured = update_actor(
                learner.student, learner.actor_optimiser, batch, known, o,
                config.sampling.temperature, guides[i], config.teacher.weight,
            )  # fmt: skip
            if learner.critic is not None and learner.critic_optimiser is not None:
                measured |= update_critic(learner.critic, learner.critic_optimiser, batch, known, o)
            made.append(measured)
    means = {name: float(np.mean([m[name] for m in made])) for name in made[0]}
    return means | {
        "first_max_log_ratio": made[0]["max_log_ratio"],
        "lr": learner.actor_optimiser.param_groups[0]["lr"],
    }


def update_actor(
    root: PolicyRoot,
    optimiser: torch.optim.Optimizer,
    batch: MiniBatch,
    terms: Terms,
    config: OptimiseConfig,
    temperature: float,
    guide: Guide | None,
    weight: float,
) -> dict[str, float]:
    """Equation (actor): L = L_PPO − α·H + λ·L_OPD, each a mean over its own mask over the global mini-batch."""
    optimiser.zero_grad(set_to_none=True)
    D, D_T = len(batch), 0 if guide is None else int(guide.mask.sum())
    sums, moved = torch.zeros(8, dtype=torch.float64), 0.0
    for work, counts in ranks.deal(batch.work):
        place = torch.as_tensor(work.place)
        teacher = () if guide is None or not D_T else (guide.head, guide.states[int(place[0])]) if counts else ()
        logp, entropy, *divergence = root(work.packed, temperature, *teacher)
        old, advantage = terms.logp_old[place].to(logp), terms.advantage[place].to(logp)
        loss_ppo = policy_loss(logp, old, advantage, config.clip)
        loss = loss_ppo / D - config.entropy * entropy_bonus(entropy) / D
        if divergence and guide is not None:
            mask = guide.mask[place].to(logp.device)
            loss = loss + weight * distillation_loss(divergence[0], mask) / D_T
        # FSDP averages over ranks: local sums over the global count are scaled up by the number of ranks.
        (loss * (ranks.world() if counts else 0.0)).backward()
        if counts:
            with torch.no_grad():
                kl = divergence[0] if divergence else torch.zeros_like(logp)
                thinking = terms.thinking[place].to(logp.device)
                sums += torch.stack(
                    [
                        loss_ppo,
                        entropy.sum(),
                        kl.sum(),
                        kl[thinking].sum(),
                        kl[~thinking].sum(),
                        thinking.sum(),
                        clip_fraction(logp, old, config.clip),
                        approximate_kl(logp, old),
                    ]
                ).double().cpu()  # fmt: skip
                moved = max(moved, float((logp - old).abs().max()))
    ranks.total(sums)
    norm = clipped_step(root, optimiser, config.max_grad_norm, float(sums.sum()), "the actor's")
    ppo, H, kl_all, kl_think, kl_act, n_think, clipped, old_kl = sums.tolist()
    return {
        "loss_ppo": ppo / D,
        "entropy": H / D,
        "teacher_kl": kl_all / D,
        "teacher_kl_think": kl_think / max(n_think, 1),
        "teacher_kl_action": kl_act / max(D - n_think, 1),
        "clip_fraction": clipped / D,
        "approx_kl": old_kl / D,
        "max_log_ratio": max(ranks.gather(moved)),
        "grad_norm": norm,
    }


def update_critic(
    root: ValueRoot, optimiser: torch.optim.Optimizer, batch: MiniBatch, terms: Terms, config: OptimiseConfig
) -> dict[str, float]:
    optimiser.zero_grad(set_to_none=True)
    D, loss_sum = len(batch), torch.zeros(1, dtype=torch.float64)
    for work, counts in ranks.deal(batch.work):
        place = torch.as_tensor(work.place)
        value = root(work.packed)
        old, target = terms.value_old[place].to(value), terms.target[place].to(value)
        loss = value_loss(value, old, target, config.value_clip)
        (loss / D * (ranks.world() if counts else 0.0)).backward()
        loss_sum += float(loss.detach()) * counts
    ranks.total(loss_sum)
    norm = clipped_step(root, optimiser, config.max_grad_norm, float(loss_sum), "the critic's")
    return {"loss_value": float(loss_sum) / D, "critic_grad_norm": norm}


def clipped_step(root: Any, optimiser: torch.optim.Optimizer, max_norm: float, loss: float, whose: str) -> float:
    norm = torch.nn.utils.clip_grad_norm_(root.parameters(), max_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(loss) or not math.isfinite(float(norm)):
        raise ValueError(
            f"{whose} loss or gradient is not finite (gradient norm {float(norm)}): nothing was updated; "
            "lower the learning rate, or look at the last metrics for what grew"
        )
    optimiser.step()
    return float(norm)


def learning_rate(base: float, step: int, steps: int, warmup: float, schedule: str) -> float:
    """A function of the step alone: nothing to save, nothing to restore."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return base * (step + 1) / rising
    if schedule == "constant":
        return base
    done = (step - rising) / max(1, steps - rising)
    return base * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
