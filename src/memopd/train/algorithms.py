"""What a training algorithm decides: how much credit each sampled token gets, and the loss that follows from it.

    ppo    a critic and GAE over the sampled tokens of an episode        clipped ratio of each token
    grpo   (R − mean) / standard deviation of the episodes of its task   clipped ratio of each token
    rloo   R − mean of the other episodes of its task                    clipped ratio of each token
    gspo   as grpo                                                       clipped ratio of each call, as a whole

An algorithm is a class of `needs_critic`, `credit` and `loss` (`Algorithm`), made once per run with the settings of
[optimise] that its constructor names. Your own is `optimise.algorithm = "module:Class"`; examples/own_algorithm.py has
one. The caller adds entropy and the teacher's term, and takes care of packs, accumulation and ranks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from memopd.config import OptimiseConfig
from memopd.names import build, resolve
from memopd.train.advantages import (
    gae,
    group_advantages,
    leave_one_out,
    reference_penalty,
    token_rewards,
    whiten,
)
from memopd.train.losses import outside, policy_loss

SETTING = "optimise.algorithm"
UNITS = ("token", "call", "episode")


@dataclass(frozen=True, slots=True)
class Experience:
    """All sampled tokens of a step (D of them, in E episodes of C calls), and what they earned.

    Episode after episode, call after call, token after token. Context and observations are not in it. On the CPU.
    """

    logp_old: Tensor  # [D] log-probability under the policy at the beginning of the step
    logp_ref: Tensor  # [D] under the reference; logp_old where optimise.reference = 0
    value: Tensor  # [D] the critic's; zeros where there is none
    episode: Tensor  # [D] the episode of each token, 0 .. E − 1
    call: Tensor  # [D] the call of each token, 0 .. C − 1
    last: Tensor  # [D] bool: the last token of its episode
    call_last: Tensor  # [D] bool: the last token of its call
    task_reward: Tensor  # [E] what the task gave at the end
    call_reward: Tensor  # [C] r_t, what the environment gave for each call
    group: Tensor  # [E] episodes of one task have the same number

    @property
    def penalty(self) -> Tensor:
        """[D] [ℓ_old − ℓ_ref]₊: how far each token has moved away from the reference."""
        return reference_penalty(self.logp_old, self.logp_ref)

    def rewards(self, beta: float = 0.0) -> Tensor:
        """[D] r̃: rewards on the tokens that earned them, less β times the penalty on every token."""
        penalty = self.penalty if beta else torch.zeros_like(self.logp_old)
        return token_rewards(penalty, beta, self.last, self.task_reward, self.call_last, self.call_reward)

    @property
    def outcome(self) -> Tensor:
        """[E] R: all that an episode earned, of the task and of its calls."""
        return torch.zeros_like(self.task_reward).index_add(0, self.episode, self.rewards())


@dataclass(frozen=True, slots=True)
class Credit:
    advantage: Tensor  # [D]
    target: Tensor | None = None  # [D] what the critic learns; with `needs_critic`
    metrics: dict[str, float] = field(default_factory=dict)  # written to metrics.jsonl under these names


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sampled tokens of one pack (d of them, in c calls), under the policy as it is now. On its device.

    A pack holds calls whole, and parts of episodes: what a loss needs of a whole episode belongs in the advantage.
    """

    logp: Tensor  # [d] log-probability under the policy; the loss is differentiated through it
    entropy: Tensor  # [d] of the policy, likewise
    logp_old: Tensor  # [d]
    logp_ref: Tensor  # [d]
    advantage: Tensor  # [d] what `credit` gave
    call: Tensor  # [d] the call of each token, 0 .. c − 1
    call_size: Tensor  # [c] tokens of each call

    def call_mean(self, values: Tensor) -> Tensor:
        """[d] to [c]: the mean over the tokens of each call."""
        return values.new_zeros(len(self.call_size)).index_add(0, self.call, values) / self.call_size


class Algorithm(Protocol):
    """What your class must have. It may also have:

    unit: str          what the loss is a sum over: "token" (the default), "call" or "episode"
    needs_group: bool  True: it compares episodes of a task, so that optimise.samples = 1 is refused; default False
    clipped(tokens)    [d] bool: tokens whose ratio is outside the clip; their share is the metric `clip_fraction`
    """

    needs_critic: ClassVar[bool]  # True: a critic is trained, on the targets that `credit` gives

    def credit(self, experience: Experience) -> Credit:
        """Advantages of all tokens of a step. Called once per step, before the update."""

    def loss(self, tokens: Tokens) -> Tensor:
        """A scalar, the *sum* over this pack's tokens (or calls); called for every pack of a mini-batch.

        The caller divides by the number of `unit`s in the whole mini-batch, so that neither packing nor accumulation
        nor ranks change the result. A mean in here would.
        """


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of PPO on the ratio of each token: what the built-in algorithms have in common."""

    clip: float  # ε
    clip_high: float = 0.0  # 0: as `clip`
    reference: float = 0.0  # β

    needs_critic: ClassVar[bool] = False
    needs_group: ClassVar[bool] = False
    unit: ClassVar[str] = "token"

    @property
    def high(self) -> float:
        return self.clip_high or self.clip

    def loss(self, tokens: Tokens) -> Tensor:
        return policy_loss(tokens.logp, tokens.logp_old, tokens.advantage, self.clip, self.high)

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(tokens.logp - tokens.logp_old, self.clip, self.high)


@dataclass(frozen=True)
class PPO(Clipped):
    """The paper's: GAE over the sampled tokens of an episode, across its calls (Schulman et al., 2016 and 2017)."""

    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten: bool = True

    needs_critic: ClassVar[bool] = True

    def credit(self, experience: Experience) -> Credit:
        value, last = experience.value, experience.last
        advantage = gae(experience.rewards(self.reference), value, last, self.gamma, self.gae_lambda)
        target, metrics = advantage + value, {"advantage_std": spread(advantage)}  # before whitening makes it 1
        return Credit(whiten(advantage) if self.whiten else advantage, target, metrics)


@dataclass(frozen=True)
class GRPO(Clipped):
    """Every token of an episode gets (R − mean) / deviation of the episodes of its task (Shao et al., 2024).

    Only what was earned is compared: penalties that differ by a trifle must not part a group that agrees. Each token's
    own penalty is taken off afterwards. The loss is a mean over tokens, so that long episodes do not count for less.
    """

    needs_group: ClassVar[bool] = True

    def credit(self, experience: Experience) -> Credit:
        advantage = group_advantages(experience.outcome, experience.group, experience.episode)
        return Credit(advantage - self.reference * experience.penalty)


@dataclass(frozen=True)
class RLOO(Clipped):
    """R less the mean of the other episodes of its task (Kool et al., 2019; Ahmadian et al., 2024).

    The penalty is taken off as in GRPO. Its authors' loss is REINFORCE, −log π · A; this clipped surrogate has the
    same gradient as long as the ratio is 1, that is in the first mini-batch of a step, and is safe after it.
    """

    needs_group: ClassVar[bool] = True

    def credit(self, experience: Experience) -> Credit:
        advantage = leave_one_out(experience.outcome, experience.group, experience.episode)
        return Credit(advantage - self.reference * experience.penalty)


@dataclass(frozen=True)
class GSPO(GRPO):
    """GRPO's credit, clipped by sequences (Zheng et al., 2025); a sequence is a call, what one act of sampling made.

    s = exp(mean of log ϱ over the call's tokens), and the loss is the mean over calls of −min(s A, clip(s) A), where A
    is the mean advantage of the call's tokens. A mean of logarithms moves far less than a token's ratio: its authors
    clip at 3e-4 and 4e-4 (`clip`, `clip_high`).
    """

    unit: ClassVar[str] = "call"

    def loss(self, tokens: Tokens) -> Tensor:
        log_ratio, advantage = tokens.call_mean(tokens.logp - tokens.logp_old), tokens.call_mean(tokens.advantage)
        return policy_loss(log_ratio, torch.zeros_like(log_ratio), advantage, self.clip, self.high)

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(tokens.call_mean(tokens.logp - tokens.logp_old), self.clip, self.high)[tokens.call]


ALGORITHMS: dict[str, Any] = {"ppo": PPO, "grpo": GRPO, "rloo": RLOO, "gspo": GSPO}


def algorithm_of(o: OptimiseConfig) -> Algorithm:
    """The algorithm that a run names, made with its settings. Mistakes are one line, and cost no model."""
    part = resolve(SETTING, o.algorithm, ALGORITHMS, ("needs_critic", "credit", "loss"))
    if not inspect.isclass(part):
        raise ValueError(f"{SETTING}: {o.algorithm!r} must be a class, got {type(part).__name__}")
    made: Algorithm = build(SETTING, o.algorithm, part, {name: getattr(o, name) for name in type(o).__annotations__})
    for method, argument in (("credit", "Experience"), ("loss", "Tokens")):
        if not _takes_one(getattr(made, method)):
            raise ValueError(f"{SETTING}: {method} of {o.algorithm!r} must be a method of one argument ({argument})")
    if unit_of(made) not in UNITS:
        raise ValueError(f"{SETTING}: unit of {o.algorithm!r} must be one of {', '.join(UNITS)}, got {unit_of(made)!r}")
    return made


def _takes_one(method: Any) -> bool:
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def unit_of(algorithm: Algorithm) -> str:
    return getattr(algorithm, "unit", "token")


def needs_group(algorithm: Algorithm) -> bool:
    return getattr(algorithm, "needs_group", False)


def clipped_tokens(algorithm: Algorithm, tokens: Tokens) -> Tensor:
    """[d] bool: none of an algorithm that does not clip."""
    clipped = getattr(algorithm, "clipped", None)
    return torch.zeros_like(tokens.call, dtype=torch.bool) if clipped is None else clipped(tokens)


def spread(advantage: Tensor) -> float:
    return float(advantage.std()) if len(advantage) > 1 else 0.0
