"""One optimiser step of the actor and of the critic on a mini-batch, whatever packs and ranks it is spread over."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from memopd.config import OptimiseConfig
from memopd.train import ranks
from memopd.train.batch import MiniBatch
from memopd.train.learner import Learner
from memopd.train.losses import (
    approximate_kl,
    clip_fraction,
    distillation_loss,
    entropy_bonus,
    policy_loss,
    value_loss,
)
from memopd.train.models import PolicyRoot, Root, ValueRoot
from memopd.train.scoring import Guide
from memopd.train.terms import Terms


def update(
    learner: Learner, batches: list[MiniBatch], terms: list[Terms], guides: list[Guide | None], step: int
) -> dict[str, float]:
    """PPO epochs over the mini-batches. Means over them are reported, and how far the very first ratio is from one."""
    config, o = learner.config, learner.config.optimise
    lr = set_learning_rate(learner.actor_optimiser, learning_rate(o.lr, step, o.steps, o.warmup, o.schedule))
    if learner.critic_optimiser is not None:
        rate = learning_rate(o.critic_lr, step, o.steps, o.critic_warmup, o.schedule)
        set_learning_rate(learner.critic_optimiser, rate)
    made: list[dict[str, float]] = []
    for epoch in range(o.epochs):
        for i in np.random.default_rng([config.run.seed, step, epoch]).permutation(len(batches)):
            measured = update_actor(
                learner.student, learner.actor_optimiser, batches[i], terms[i], o,
                config.sampling.temperature, guides[i], config.teacher.weight, keep=epoch == 0,
            )  # fmt: skip
            if learner.critic is not None and learner.critic_optimiser is not None:
                measured |= update_critic(learner.critic, learner.critic_optimiser, batches[i], terms[i], o)
            made.append(measured)
    means = {name: float(np.mean([m[name] for m in made])) for name in made[0] if name != "ratio_error"}
    return means | {"first_ratio_error": made[0]["ratio_error"], "lr": lr}


def update_actor(
    root: PolicyRoot,
    optimiser: torch.optim.Optimizer,
    batch: MiniBatch,
    terms: Terms,
    config: OptimiseConfig,
    temperature: float,
    guide: Guide | None = None,
    weight: float = 0.0,
    keep: bool = False,  # the divergences, in `guide`, for the traces
) -> dict[str, float]:
    """Equation (actor): L = L_PPO − α·H + λ·L_OPD, each a mean over its own mask over the global mini-batch."""
    D, D_T = len(batch), 0 if guide is None else int(guide.mask.sum())
    device = next(root.parameters()).device
    known_old, known_advantage, is_thought = (t.to(device) for t in (terms.logp_old, terms.advantage, terms.thinking))
    mask = guide.mask.to(device) if guide is not None else is_thought
    # Sums stay on the device until the last pack is on its way: reading one would make the host wait for it.
    sums, ratio_error = torch.zeros(7, dtype=torch.float64, device=device), torch.zeros((), device=device)
    for work, is_real in ranks.deal(batch.work):
        place = torch.as_tensor(work.place, device=device)
        theirs = (guide.head, guide.states[int(work.place[0])]) if guide is not None and D_T and is_real else ()
        logp, entropy, *divergence = root(work.packed, temperature, *theirs)
        old, advantage = known_old[place].to(logp), known_advantage[place].to(logp)
        ppo, H, kl = policy_loss(logp, old, advantage, config.clip), entropy_bonus(entropy), torch.zeros_like(logp)
        opd, loss = torch.zeros_like(ppo), ppo / D - config.entropy * H / D
        if divergence:
            kl = divergence[0]
            opd = distillation_loss(kl, mask[place])
            loss = loss + weight * opd / D_T
        backward(loss, is_real)
        if not is_real:
            continue
        with torch.no_grad():
            if keep and guide is not None and guide.divergence is not None:
                guide.divergence[place] = kl.to(guide.divergence)
            gone, k3 = clip_fraction(logp, old, config.clip), approximate_kl(logp, old)
            of_thoughts = distillation_loss(kl, is_thought[place])
            sums += torch.stack([ppo, H, opd, of_thoughts, kl.sum() - of_thoughts, gone, k3]).double()
            ratio_error = torch.maximum(ratio_error, (logp - old).expm1().abs().max())
    totals: list[float] = ranks.total(sums).tolist()
    ppo_sum, H_sum, opd_sum, kl_think, kl_action, gone_sum, k3_sum = totals
    thinking_count = int(terms.thinking.sum())
    measured = {
        "loss_ppo": ppo_sum / D,
        "entropy": H_sum / D,
        "clip_fraction": gone_sum / D,
        "approx_kl": k3_sum / D,
        "ratio_error": max(ranks.gather(float(ratio_error))),
        "grad_norm": clipped_step(root, optimiser, config.max_grad_norm, sum(totals), "the actor's"),
    }
    if guide is not None:
        measured |= {
            "loss_opd": opd_sum / max(D_T, 1),
            "teacher_kl_think": kl_think / max(thinking_count, 1),
            "teacher_kl_action": kl_action / max(D - thinking_count, 1),
        }
    return measured


def update_critic(
    root: ValueRoot, optimiser: torch.optim.Optimizer, batch: MiniBatch, terms: Terms, config: OptimiseConfig
) -> dict[str, float]:
    D, device = len(batch), next(root.parameters()).device
    known_old, known_target = terms.value_old.to(device), terms.target.to(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for work, is_real in ranks.deal(batch.work):
        place = torch.as_tensor(work.place, device=device)
        value = root(work.packed)
        loss = value_loss(value, known_old[place].to(value), known_target[place].to(value), config.value_clip)
        backward(loss / D, is_real)
        total += loss.detach() * is_real
    loss_sum = float(ranks.total(total))
    norm = clipped_step(root, optimiser, config.max_grad_norm, loss_sum, "the critic's")
    return {"loss_value": loss_sum / D, "critic_grad_norm": norm}


def backward(loss: torch.Tensor, is_real: bool) -> None:
    """FSDP averages over ranks: sums over the global count are scaled up by their number. A filler counts nothing."""
    (loss * (ranks.world() if is_real else 0)).backward()


def clipped_step(root: Root, optimiser: torch.optim.Optimizer, max_norm: float, loss: float, whose: str) -> float:
    """One step; the gradients go at once, so that only one model's take memory at a time."""
    norm = torch.nn.utils.clip_grad_norm_(root.parameters(), max_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise ValueError(
            f"{whose} loss or gradient is not a number (loss {loss}, gradient norm {float(norm)}): the step was not "
            "taken; lower the learning rate, and see metrics.jsonl for what grew; the last checkpoint is intact"
        )
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
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


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> float:
    for group in optimiser.param_groups:
        group["lr"] = rate
    return rate
