"""The losses. Each is a pure function of its terms at the decisions.

Every function returns a *sum*; the caller divides it by the count over the global mini-batch, so that packing,
accumulation and the number of ranks do not change the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRUNCATION = 2.0  # C, the usual cap of truncated importance sampling


def importance_weights(logp_old: Tensor, logp_sampled: Tensor) -> Tensor:
    """Truncated importance sampling: w_j = min(π_old(a_j) / μ(a_j), C), a constant for the gradient.

    μ is the policy that sampled the token, as recorded; π_old is the policy at the beginning of the update. The policy
    loss of the token is multiplied by w_j: PPO's ratio ϱ = π_θ / π_old limits how far one update moves the policy, and
    w corrects for an older policy that sampled. This is decoupled PPO (Hilton et al., 2022). The truncation bounds the
    variance (Espeholt et al., 2018; Yao et al., 2025).
    """
    _flat(logp_old, logp_sampled)
    return (logp_old - logp_sampled).exp().clamp(max=TRUNCATION).detach()


def policy_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, clip: float, clip_high: float) -> Tensor:
    """Equation (ppo), summed: −Σ_j min(ϱ_j A_j, clip(ϱ_j, 1 − ε, 1 + ε_high) A_j).

    The paper has ε_high = ε. A higher one (DAPO: 0.28 with ε = 0.2) lets unlikely tokens grow and keeps entropy high.
    """
    _flat(logp, logp_old, advantage)
    ratio = (logp - logp_old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip_high) * advantage).sum()


def value_loss(value: Tensor, value_old: Tensor, target: Tensor, clip: float) -> Tensor:
    """½ Σ_j max((V − R)², (clip(V, V_old ± ε_V) − R)²): the clip limits how far the critic moves in one update, too."""
    _flat(value, value_old, target)
    clipped = value_old + (value - value_old).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2).sum()


def distillation_loss(divergence: Tensor, mask: Tensor) -> Tensor:
    """Equation (teacher), summed: Σ_j m^T_j KL(p_θ,j ‖ p_T,j), or another divergence from the teacher.

    An empty mask gives zero and no gradient.
    """
    _flat(divergence, mask)
    return torch.where(mask, divergence, 0.0).sum()


def entropy_bonus(entropy: Tensor) -> Tensor:
    """H, summed."""
    return entropy.sum()


def outside(log_ratio: Tensor, clip: float, clip_high: float) -> Tensor:
    """True for ratios outside [1 − ε, 1 + ε_high]."""
    beyond = log_ratio.exp() - 1
    return (beyond < -clip) | (beyond > clip_high)


def approximate_kl(logp: Tensor, logp_old: Tensor) -> Tensor:
    """KL(π_old ‖ π_θ) by Schulman's k3, summed: (ϱ − 1) − log ϱ, never negative."""
    gap = logp - logp_old
    return (gap.expm1() - gap).sum()


def _flat(*arrays: Tensor) -> None:
    assert {a.shape for a in arrays} == {(len(arrays[0]),)}, [a.shape for a in arrays]
