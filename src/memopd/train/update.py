"""One optimiser step of the actor and of the critic per mini-batch, independent of its packs and ranks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memopd.config import OptimiseConfig
from memopd.models.device import to_device
from memopd.train import ranks
from memopd.train.algorithms import SETTING, Algorithm, Tokens, clipped_tokens, unit_of
from memopd.train.batch import MiniBatch, Work
from memopd.train.later import unknown
from memopd.train.learner import Learner
from memopd.train.losses import approximate_kl, distillation_loss, entropy_bonus, importance_weights, value_loss
from memopd.train.models import Root, ValueRoot, master_dtype
from memopd.train.scoring import Guide
from memopd.train.terms import Terms


def update(
    learner: Learner, batches: list[MiniBatch], terms: list[Terms], guides: list[Guide | None], step: int
) -> dict[str, float]:
    """Runs the epochs over the mini-batches. Returns means over them, and how far the first ratio is from one."""
    config, o = learner.config, learner.config.optimise
    lr = set_learning_rate(learner.actor_optimiser, learning_rate(o.lr, step, o.steps, o.warmup, o.schedule))
    if learner.critic_optimiser is not None:
        rate = learning_rate(o.critic_lr, step, o.steps, o.critic_warmup, o.schedule)
        set_learning_rate(learner.critic_optimiser, rate)
    made: list[dict[str, float]] = []
    with learner.passes():
        for epoch in range(o.epochs):
            order = np.random.default_rng([config.run.seed, step, epoch]).permutation(len(batches))
            if epoch == 0:
                for i in order[1:]:
                    _ = terms[i].logp_old  # computed now if it is unknown: the weights move after the first mini-batch
            for i in order:
                measured = update_actor(learner, batches[i], terms[i], guides[i], keep=epoch == 0)
                if learner.critic is not None and learner.critic_optimiser is not None:
                    measured |= update_critic(learner.critic, learner.critic_optimiser, batches[i], terms[i], o)
                made.append(measured)
    means = {name: float(np.mean([m[name] for m in made])) for name in made[0] if name != "ratio_error"}
    return means | {"first_ratio_error": made[0]["ratio_error"], "lr": lr}


def update_actor(
    learner: Learner,
    batch: MiniBatch,
    terms: Terms,
    guide: Guide | None = None,
    keep: bool = False,  # True: store the divergences in `guide`, for the traces
) -> dict[str, float]:
    """Equation (actor): L = L_PPO − α·H + λ·L_OPD, each a mean over its own mask over the global mini-batch.

    L_PPO is the algorithm's loss: a mean over the tokens, or over its `unit`.
    """
    root, algorithm, config = learner.student, learner.algorithm, learner.config
    D, D_T, D_think = len(batch), 0 if guide is None else int(guide.mask.sum()), int(terms.thinking.sum())
    units = {"token": D, "call": len(batch.calls), "episode": len(batch.episodes)}[unit_of(algorithm)]
    device = next(root.parameters()).device
    known = terms.to(device)
    mask = guide.mask.to(device) if guide is not None else known.thinking
    later = unknown(terms, "logp_old")  # in the first step, π_old is what this pass computes
    found = torch.zeros(D, dtype=master_dtype(config.model), device=device)
    sampled = to_device(batch.logp_sampled, device) if config.sampling.ahead else None
    # Sums stay on the device until the last pack is launched, because reading one makes the host wait for it.
    sums, ratio_error = torch.zeros(7, dtype=torch.float64, device=device), torch.zeros((), device=device)
    for work, is_real in ranks.deal(batch.work):
        place = to_device(work.place, device)
        target = guide.target(work) if guide is not None and is_real else None
        logp, entropy, *divergence = root(work.packed, config.sampling.temperature, target)
        tokens = tokens_of(batch, work, known, logp, entropy, sampled)
        ppo, H, kl = summed(algorithm, tokens), entropy_bonus(entropy), torch.zeros_like(logp)
        opd, loss = torch.zeros_like(ppo), ppo / units - config.optimise.entropy * H / D
        if divergence:
            kl = divergence[0]
            opd = distillation_loss(kl, mask[place])
            if D_T:  # with an empty mask, the divergence is only measured
                loss = loss + config.teacher.weight * opd / D_T
        backward(loss, is_real)
        if not is_real:
            continue
        with torch.no_grad():
            if later is not None:
                found[place] = logp.to(found)
            if keep and guide is not None and guide.divergence is not None:
                guide.divergence[place] = kl.to(guide.divergence)
            clipped, k3 = clipped_tokens(algorithm, tokens).sum(), approximate_kl(logp, tokens.logp_old)
            kl_think = distillation_loss(kl, known.thinking[place])
            sums += torch.stack([ppo, H, clipped, k3, opd, kl_think, kl.sum() - kl_think]).double()
            ratio_error = torch.maximum(ratio_error, (logp - tokens.logp_old).expm1().abs().max())
    if later is not None:
        later.value = ranks.total(found).cpu()
    counts = {"loss_ppo": units, "entropy": D, "clip_fraction": D, "approx_kl": D}
    if guide is not None:
        counts |= {"loss_opd": D_T, "teacher_kl_think": D_think, "teacher_kl_action": D - D_think}
    totals: list[float] = ranks.total(sums).tolist()
    measured = {name: total / max(count, 1) for (name, count), total in zip(counts.items(), totals, strict=False)}
    norm = clipped_step(root, learner.actor_optimiser, config.optimise.max_grad_norm, sum(totals), "the actor's")
    return measured | {"ratio_error": max(ranks.gather(float(ratio_error))), "grad_norm": norm}


def tokens_of(
    batch: MiniBatch, work: Work, known: Terms, logp: Tensor, entropy: Tensor, sampled: Tensor | None = None
) -> Tokens:
    """The argument of the algorithm's loss, for one pack.

    `sampled`: [D] log-probabilities under the policies that sampled the tokens, if they are not π_old.
    """
    _, call, size = batch.calls_in(work)
    place, at, sizes = (to_device(array, logp.device) for array in (work.place, call, size))
    if unknown(known, "logp_old") is not None:
        old = ref = logp.detach()
    else:
        old, ref = (values[place].to(logp) for values in (known.logp_old, known.logp_ref))
    advantage = known.advantage[place].to(logp)
    if sampled is not None:
        advantage = advantage * importance_weights(old, sampled[place].to(old))
    return Tokens(logp, entropy, old, ref, advantage, at, sizes)


def summed(algorithm: Algorithm, tokens: Tokens) -> Tensor:
    """The algorithm's loss. Users may write their own, so we check that it is one number with a gradient."""
    loss = algorithm.loss(tokens)
    if not isinstance(loss, Tensor) or loss.shape != ():
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{SETTING}: loss of {type(algorithm).__name__} must return one number, a sum, got {got}")
    if tokens.logp.requires_grad and not loss.requires_grad:
        raise ValueError(
            f"{SETTING}: loss of {type(algorithm).__name__} has no gradient, so it would train nothing: compute it "
            "from tokens.logp without detach; for no loss at all, return 0 * tokens.logp.sum()"
        )
    return loss


def update_critic(
    root: ValueRoot, optimiser: torch.optim.Optimizer, batch: MiniBatch, terms: Terms, config: OptimiseConfig
) -> dict[str, float]:
    D, device = len(batch), next(root.parameters()).device
    known_old, known_target = terms.value_old.to(device), terms.target.to(device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for work, is_real in ranks.deal(batch.work):
        place = to_device(work.place, device)
        value = root(work.packed)
        loss = value_loss(value, known_old[place].to(value), known_target[place].to(value), config.value_clip)
        backward(loss / D, is_real)
        total += loss.detach() * is_real
    loss_sum = float(ranks.total(total))
    norm = clipped_step(root, optimiser, config.max_grad_norm, loss_sum, "the critic's")
    return {"loss_value": loss_sum / D, "critic_grad_norm": norm}


def backward(loss: Tensor, is_real: bool) -> None:
    """FSDP averages gradients over ranks, so losses are multiplied by the number of ranks; fillers count 0."""
    (loss * (ranks.world() if is_real else 0)).backward()


def clipped_step(root: Root, optimiser: torch.optim.Optimizer, max_norm: float, loss: float, whose: str) -> float:
    """Take one step, and free the gradients at once, so that only one model's gradients take memory at a time."""
    norm = torch.nn.utils.clip_grad_norm_(root.weights.values(), max_norm)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise ValueError(
            f"{whose} loss or gradient is not a number (loss {loss}, gradient norm {float(norm)}): the step was not "
            "taken; lower the learning rate, and see metrics.jsonl for what grew; the last checkpoint is intact"
        )
    optimiser.step()
    root.publish()
    optimiser.zero_grad(set_to_none=True)
    return float(norm)


def learning_rate(base: float, step: int, steps: int, warmup: float, schedule: str) -> float:
    """Depends only on the step, so that a checkpoint need not store it."""
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
