"""From rewards to advantages, over sampled decisions only. Pure functions, one equation each.

Arrays are over the decisions of a batch: episode after episode, call after call, token after token. They do not contain
copied context and observations, so the recursion cannot pass over these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_penalty(logp_old: Tensor, logp_ref: Tensor) -> Tensor:
    """Equation (reward), left: KL^ref_j = [ℓ_old,j − ℓ_ref,j]₊."""
    _flat(logp_old, logp_ref)
    return (logp_old - logp_ref).clamp(min=0.0)


def token_rewards(
    kl_ref: Tensor,  # [D]
    beta: float,
    last: Tensor,  # [D] bool: the last sampled token of its episode
    task_reward: Tensor,  # [E] in the order of the episodes
    call_last: Tensor,  # [D] bool: the last sampled token of its call
    call_reward: Tensor,  # [C] r_t, in the order of the calls
) -> Tensor:
    """Equation (reward), right: r̃_j = r_j − β·KL^ref_j. r_t is on the last token of its call, the task's reward on the
    last token of the episode."""
    _flat(kl_ref, last, call_last)
    reward = -beta * kl_ref
    reward[call_last] += call_reward.to(reward)
    reward[last] += task_reward.to(reward)
    return reward


def gae(
    reward: Tensor,  # [D] r̃
    value: Tensor,  # [D] V
    last: Tensor,  # [D] bool: the episode ends here, so V after it is zero
    gamma: float,
    lam: float,
) -> Tensor:
    """Equation (gae): δ_n = r̃_n + γ·V_{n+1} − V_n,  A_n = δ_n + γλ·A_{n+1}."""
    _flat(reward, value, last)
    goes_on, V = (~last).double(), value.double()  # the recursion sums thousands of terms
    next_V = torch.cat([V[1:], V.new_zeros(1)]) * goes_on
    delta = reward.double() + gamma * next_V - V
    advantage, decay, carried = delta.tolist(), (gamma * lam * goes_on).tolist(), 0.0
    for n in reversed(range(len(advantage))):
        carried = advantage[n] + decay[n] * carried
        advantage[n] = carried
    return torch.tensor(advantage, dtype=torch.float64).to(value)


def group_advantages(
    outcome: Tensor,  # [E] the total reward of each episode
    group: Tensor,  # [E] the same number for all episodes of a task
    episode: Tensor,  # [D] the episode of each decision
) -> Tensor:
    """Without a critic: every decision of an episode gets (R − mean of its group) / standard deviation of its group.

    A group of equal rewards, or of one episode, gives zero: there is nothing to learn from it. Computed in double
    precision, so that the mean of equal rewards equals them; otherwise rounding would be scaled up to a deviation of 1.
    """
    _, index, size = group.unique(return_inverse=True, return_counts=True)
    R = outcome.double()
    mean = R.new_zeros(len(size)).index_add(0, index, R) / size
    centred = R - mean[index]
    variance = R.new_zeros(len(size)).index_add(0, index, centred**2) / (size - 1).clamp(min=1)
    deviation = variance.sqrt()[index]
    return torch.where(deviation > 1e-6, centred / deviation, 0.0)[episode].to(outcome)


def leave_one_out(
    outcome: Tensor,  # [E] the total reward of each episode
    group: Tensor,  # [E] the same number for all episodes of a task
    episode: Tensor,  # [D] the episode of each decision
) -> Tensor:
    """Without a critic: every decision of an episode gets R − mean of the *other* episodes of its group.

    With n members that is (R − mean of all) · n / (n − 1). An episode without others has no comparison and gets zero.
    Computed in double precision, so that the mean of equal rewards equals them.
    """
    _, index, size = group.unique(return_inverse=True, return_counts=True)
    R = outcome.double()
    others = (size - 1)[index]
    baseline = (R.new_zeros(len(size)).index_add(0, index, R)[index] - R) / others.clamp(min=1)
    return torch.where(others > 0, R - baseline, 0.0)[episode].to(outcome)


def whiten(advantage: Tensor) -> Tensor:
    """Zero mean and unit variance over the batch, as in verl: (A − mean) / √(variance + 1e-8)."""
    if len(advantage) < 2:
        return torch.zeros_like(advantage)
    A = advantage.double()
    return ((A - A.mean()) / (A.var() + 1e-8).sqrt()).to(advantage)


def explained_variance(value: Tensor, target: Tensor) -> float:
    """1 − Var(target − V) / Var(target): 1 for a perfect critic, 0 for one that predicts the mean."""
    if len(target) < 2 or not (variance := target.double().var()) > 0:
        return 0.0
    return float(1 - (target.double() - value.double()).var() / variance)


def _flat(*arrays: Tensor) -> None:
    assert {a.shape for a in arrays} == {(len(arrays[0]),)}, [a.shape for a in arrays]
