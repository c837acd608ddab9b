"""Training algorithms define the credit of each sampled token and the policy loss.

    ppo    a critic and GAE over the sampled tokens of an episode        clipped ratio of each token
    grpo   (R − mean) / standard deviation of the episodes of its task   clipped ratio of each token
    rloo   R − mean of the other episodes of its task                    clipped ratio of each token
    gspo   as grpo                                                       clipped ratio of each call as a whole

An algorithm is a class with `needs_critic`, `credit` and `loss` (`Algorithm`). It is built once per run; its
constructor may have any setting of [optimise] as a parameter. You name your own by `optimise.algorithm =
"module:Class"`; examples/own_algorithm.py is an example. The caller adds entropy and the teacher's term, and takes care
of packs, accumulation and ranks.

With sampling.ahead > 0, older policies sampled the tokens. The caller then multiplies each token's advantage by its
truncated importance weight w (`losses.importance_weights`), after `credit` and before `loss`. This multiplies the
token's loss by w, because w ≥ 0: min(ϱwA, clip(ϱ)wA) = w·min(ϱA, clip(ϱ)A). GSPO gives a call the mean of w·A.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from memopd.config import OptimiseConfig
from memopd.names import build, resolve, takes
from memopd.train.advantages import (
    gae,
    group_advantages,
    leave_one_out,
    reference_penalty,
    token_rewards,
    whiten,
)
from memopd.train.later import maybe_later, unknown
from memopd.train.losses import outside, policy_loss

SETTING = "optimise.algorithm"
UNITS = ("token", "call", "episode")


@maybe_later("logp_old", "logp_ref")
@dataclass(frozen=True)
class Experience:
    """All sampled tokens of a step (D tokens, in E episodes with C calls), and their rewards, on the CPU.

    In order: episode after episode, call after call, token after token, without context and observations. With
    optimise.reference = 0, reading `logp_old` or `logp_ref` costs a scoring pass that nothing else needs.
    """

    logp_old: Tensor  # [D] log-probability under the policy at the beginning of the step
    logp_ref: Tensor  # [D] under the reference; equal to logp_old if optimise.reference = 0
    value: Tensor  # [D] of the critic; zeros without a critic
    episode: Tensor  # [D] the episode of each token, 0 .. E − 1
    call: Tensor  # [D] the call of each token, 0 .. C − 1
    last: Tensor  # [D] bool: the last token of its episode
    call_last: Tensor  # [D] bool: the last token of its call
    task_reward: Tensor  # [E] the reward of the task, at the end
    call_reward: Tensor  # [C] r_t, the environment's reward of each call
    group: Tensor  # [E] the same number for all episodes of a task

    @property
    def penalty(self) -> Tensor:
        """[D] [ℓ_old − ℓ_ref]₊: how much likelier each token is than under the reference. Zero without a reference."""
        if unknown(self, "logp_old") is not None:  # then logp_ref is logp_old, and zero needs no scoring pass
            return torch.zeros_like(self.value)
        return reference_penalty(self.logp_old, self.logp_ref)

    def rewards(self, beta: float = 0.0) -> Tensor:
        """[D] r̃: rewards at the tokens that earned them, minus β times the penalty at every token."""
        penalty = self.penalty if beta else torch.zeros_like(self.value)
        return token_rewards(penalty, beta, self.last, self.task_reward, self.call_last, self.call_reward)

    @property
    def outcome(self) -> Tensor:
        """[E] R: the total reward of an episode, from the task and its calls."""
        return torch.zeros_like(self.task_reward).index_add(0, self.episode, self.rewards())


@dataclass(frozen=True, slots=True)
class Credit:
    advantage: Tensor  # [D]
    target: Tensor | None = None  # [D] the critic's targets; required with `needs_critic`
    metrics: dict[str, float] = field(default_factory=dict)  # written to metrics.jsonl under these names


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sampled tokens of one pack (d tokens, in c calls) under the current policy, on the policy's device.

    A pack contains whole calls but only parts of episodes. A quantity of a whole episode belongs in the advantage.
    """

    logp: Tensor  # [d] log-probability under the policy; the loss is differentiated through it
    entropy: Tensor  # [d] of the policy, also differentiable
    logp_old: Tensor  # [d]
    logp_ref: Tensor  # [d]
    advantage: Tensor  # [d] from `credit`; with sampling.ahead > 0 times the importance weight of the token
    call: Tensor  # [d] the call of each token, 0 .. c − 1
    call_size: Tensor  # [c] tokens of each call

    def call_mean(self, values: Tensor) -> Tensor:
        """The mean over the tokens of each call, from [d] to [c]."""
        return values.new_zeros(len(self.call_size)).index_add(0, self.call, values) / self.call_size


class Algorithm(Protocol):
    """The members that your class must have. It may also have:

    unit: str          the loss is a sum over these: "token" (the default), "call" or "episode"
    needs_group: bool  True: it compares the episodes of a task, so optimise.samples = 1 is an error; default False
    clipped(tokens)    [d] bool: tokens whose ratio is outside the clip; their share is the metric `clip_fraction`
    """

    needs_critic: ClassVar[bool]  # True: a critic is trained on the targets from `credit`

    def credit(self, experience: Experience) -> Credit:
        """The advantages of all tokens of a step. Called once per step, before the update."""

    def loss(self, tokens: Tokens) -> Tensor:
        """A scalar: the *sum* over the tokens (or calls) of one pack. Called for every pack of a mini-batch.

        The caller divides it by the number of `unit`s in the whole mini-batch, so that packing, accumulation and ranks
        do not change the result. If you return a mean, they do.
        """


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of PPO on the ratio of each token, which the built-in algorithms have in common."""

    clip: float  # ε
    clip_high: float = 0.0  # 0: the same as `clip`
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
    """The paper's algorithm: GAE over the sampled tokens of an episode, across calls (Schulman et al., 2016, 2017)."""

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

    It compares only rewards, because slightly different penalties must not create advantages in a group of equal
    rewards. The penalty of each token is subtracted afterwards. The loss is a mean over tokens, so that the tokens of
    long episodes count as much as others.
    """

    needs_group: ClassVar[bool] = True

    def credit(self, experience: Experience) -> Credit:
        advantage = group_advantages(experience.outcome, experience.group, experience.episode)
        return Credit(advantage - self.reference * experience.penalty)


@dataclass(frozen=True)
class RLOO(Clipped):
    """R minus the mean of the other episodes of its task (Kool et al., 2019; Ahmadian et al., 2024).

    The penalty is subtracted as in GRPO. Its authors' loss is REINFORCE, −log π · A. This clipped surrogate has the
    same gradient while the ratio is 1, that is in the first mini-batch of a step, and limits the ratio after that.
    """

    needs_group: ClassVar[bool] = True

    def credit(self, experience: Experience) -> Credit:
        advantage = leave_one_out(experience.outcome, experience.group, experience.episode)
        return Credit(advantage - self.reference * experience.penalty)


@dataclass(frozen=True)
class GSPO(GRPO):
    """GRPO's credit with a clipped ratio per sequence (Zheng et al., 2025); here a sequence is a completion.

    s = exp(mean of log ϱ over the call's tokens), and the loss is the mean over calls of −min(s A, clip(s) A), where A
    is the mean advantage of the call's tokens. A mean of logarithms varies far less than a token's ratio, so its
    authors clip at 3e-4 and 4e-4 (`clip`, `clip_high`).
    """

    unit: ClassVar[str] = "call"

    def loss(self, tokens: Tokens) -> Tensor:
        log_ratio, advantage = tokens.call_mean(tokens.logp - tokens.logp_old), tokens.call_mean(tokens.advantage)
        return policy_loss(log_ratio, torch.zeros_like(log_ratio), advantage, self.clip, self.high)

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(tokens.call_mean(tokens.logp - tokens.logp_old), self.clip, self.high)[tokens.call]


ALGORITHMS: dict[str, Any] = {"ppo": PPO, "grpo": GRPO, "rloo": RLOO, "gspo": GSPO}


def algorithm_of(o: OptimiseConfig) -> Algorithm:
    """The algorithm that a run names, built with its settings. Mistakes raise one line, before a model is loaded."""
    part = resolve(SETTING, o.algorithm, ALGORITHMS, ("needs_critic", "credit", "loss"))
    if not inspect.isclass(part):
        raise ValueError(f"{SETTING}: {o.algorithm!r} must be a class, got {type(part).__name__}")
    made: Algorithm = build(SETTING, o.algorithm, part, {name: getattr(o, name) for name in type(o).__annotations__})
    for method, argument in (("credit", "Experience"), ("loss", "Tokens")):
        if not takes(getattr(made, method), 1):
            raise ValueError(f"{SETTING}: {method} of {o.algorithm!r} must be a method of one argument ({argument})")
    if unit_of(made) not in UNITS:
        raise ValueError(f"{SETTING}: unit of {o.algorithm!r} must be one of {', '.join(UNITS)}, got {unit_of(made)!r}")
    return made


def unit_of(algorithm: Algorithm) -> str:
    return getattr(algorithm, "unit", "token")


def needs_group(algorithm: Algorithm) -> bool:
    return getattr(algorithm, "needs_group", False)


def clipped_tokens(algorithm: Algorithm, tokens: Tokens) -> Tensor:
    """[d] bool. All are False for an algorithm that does not clip."""
    clipped = getattr(algorithm, "clipped", None)
    return torch.zeros_like(tokens.call, dtype=torch.bool) if clipped is None else clipped(tokens)


def spread(advantage: Tensor) -> float:
    return float(advantage.std()) if len(advantage) > 1 else 0.0
