"""The algorithms: losses worked out by hand, gradients against the plain definitions, and what names resolve to."""

import math
from dataclasses import replace

import pytest
import torch

from memopd.config import OptimiseConfig, RunConfig, SamplingConfig, TeacherConfig
from memopd.train.algorithms import ALGORITHMS, GRPO, GSPO, PPO, RLOO, Tokens, algorithm_of, needs_group, unit_of
from memopd.train.learner import check_objective

LOG = math.log


def tokens_of(ratios, advantage, call):
    """Sampled tokens with these ratios; `call` numbers the call of each from 0."""
    log_ratio = torch.tensor([LOG(r) for r in ratios], dtype=torch.float64)
    old = torch.linspace(-2.0, -1.0, len(ratios), dtype=torch.float64)
    logp, call = (old + log_ratio).requires_grad_(), torch.tensor(call)
    advantage = torch.tensor(advantage, dtype=torch.float64)
    return Tokens(logp, torch.ones_like(old), old, old, advantage, call, call.unique(return_counts=True)[1])


@pytest.mark.parametrize("kind", [PPO, GRPO, RLOO])
def test_the_clipped_ratio_of_each_token(kind):
    # ε = 0.2, upper 0.28. ϱ = 1.25 is inside, 1.5 is outside, 0.5 outside with A < 0, 0.9 inside.
    tokens = tokens_of([1.25, 1.5, 0.5, 0.9], [2.0, 2.0, -2.0, 1.0], [0, 0, 1, 1])
    algorithm = kind(clip=0.2, clip_high=0.28)
    # min(2.5, 2.5);  min(3, 2.56);  min(−1, −1.6);  0.9
    loss = algorithm.loss(tokens)
    assert loss.item() == pytest.approx(-(2.5 + 2.56 - 1.6 + 0.9))
    loss.backward()
    assert tokens.logp.grad.tolist() == pytest.approx([-2.5, 0.0, 0.0, -0.9])  # −ϱA where the clip is not the minimum
    assert algorithm.clipped(tokens).tolist() == [False, True, True, False]
    assert unit_of(algorithm) == "token"


def test_without_clip_high_both_ends_are_the_same():
    tokens = tokens_of([1.25, 0.75], [1.0, -1.0], [0, 0])
    # min(1.25, 1.2) = 1.2;  min(−0.75, −0.8) = −0.8
    assert GRPO(clip=0.2).loss(tokens).item() == pytest.approx(-(1.2 - 0.8))
    assert GRPO(clip=0.2).clipped(tokens).tolist() == [True, True]


def test_gspo_clips_the_ratio_of_a_call():
    # Three calls. ϱ = (4, 1): s = √4 = 2 outside, A > 0: clipped.  ϱ = (2, ½, 1): s = 1, although two tokens left.
    # ϱ = (1.21): s = 1.21, outside 1.2, but A < 0: the ratio itself is the minimum.
    tokens = tokens_of([4.0, 1.0, 2.0, 0.5, 1.0, 1.21], [1.0, 1.0, 2.0, 2.0, 2.0, -1.0], [0, 0, 1, 1, 1, 2])
    algorithm = GSPO(clip=0.2)
    # min(2, 1.2) = 1.2;  min(2, 2) = 2;  min(−1.21, −1.2) = −1.21
    loss = algorithm.loss(tokens)
    assert loss.item() == pytest.approx(-(1.2 + 2.0 - 1.21))
    loss.backward()
    # d s / dℓ = s / |call|: 0 where clipped;  −2·1/3 for each of three tokens;  +1·1.21 for the one of the last
    assert tokens.logp.grad.tolist() == pytest.approx([0.0, 0.0, *[-2 / 3] * 3, 1.21])
    assert algorithm.clipped(tokens).tolist() == [True, True, False, False, False, True]
    assert unit_of(algorithm) == "call"


def test_the_advantage_of_a_call_is_the_mean_of_its_tokens():
    # Penalties make them differ: A = 1, 0.5, 0 has the mean 0.5; s = 1.
    tokens = tokens_of([1.0, 1.0, 1.0], [1.0, 0.5, 0.0], [0, 0, 0])
    assert GSPO(clip=0.2).loss(tokens).item() == pytest.approx(-0.5)


def plain_tokens(tokens, low, high):
    """−Σ min(ϱA, clip(ϱ)A), token by token in Python."""
    total = 0.0
    for new, old, A in zip(tokens.logp, tokens.logp_old, tokens.advantage, strict=True):
        ratio = (new - old).exp()
        kept = ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=torch.float64)
        total = total - (ratio * A if ratio * A <= kept * A else kept * A)
    return total


def plain_calls(tokens, low, high):
    """GSPO's objective call by call: s = (Π ϱ)^(1 / |call|)."""
    total = 0.0
    for c in range(len(tokens.call_size)):
        mine = tokens.call == c
        s = (tokens.logp[mine] - tokens.logp_old[mine]).exp().prod() ** (1 / int(mine.sum()))
        A = tokens.advantage[mine].mean()
        kept = s if low <= s <= high else torch.tensor(low if s < low else high, dtype=torch.float64)
        total = total - (s * A if s * A <= kept * A else kept * A)
    return total


@pytest.mark.parametrize("kind", [PPO, GRPO, RLOO, GSPO])
@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_are_those_of_the_definition(kind, seed):
    plain = plain_calls if kind is GSPO else plain_tokens
    torch.manual_seed(seed)
    call = torch.randint(0, 25, (80,)).sort().values.unique(return_inverse=True)[1].tolist()
    ratios = torch.exp(0.3 * torch.randn(80, dtype=torch.float64)).tolist()
    tokens = tokens_of(ratios, torch.randn(80).tolist(), call)
    made, wanted = kind(clip=0.1, clip_high=0.15).loss(tokens), plain(tokens, 0.9, 1.15)
    gradients = [torch.autograd.grad(loss, tokens.logp)[0] for loss in (made, wanted)]
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    clipped = kind(clip=0.1, clip_high=0.15).clipped(tokens)
    assert clipped.any()
    assert not clipped.all()
    # What the comparison must notice: a clip that is the same at both ends.
    assert kind(clip=0.1).loss(tokens).item() != pytest.approx(wanted.item(), rel=1e-6)


def test_at_ratio_one_every_loss_is_reinforce():
    """d/dℓ of −Σ ϱA at ϱ = 1 is −A, the gradient of −Σ ℓA: RLOO's own loss. GSPO's is that of the calls' means."""
    advantage = [1.0, -2.0, 0.5, 0.5]
    for kind in (PPO, GRPO, RLOO):
        tokens = tokens_of([1.0] * 4, advantage, [0, 0, 1, 1])
        kind(clip=0.2).loss(tokens).backward()
        assert tokens.logp.grad.tolist() == pytest.approx([-a for a in advantage])
    tokens = tokens_of([1.0] * 4, advantage, [0, 0, 1, 1])
    GSPO(clip=0.2).loss(tokens).backward()
    assert tokens.logp.grad.tolist() == pytest.approx([0.25, 0.25, -0.25, -0.25])  # −A_call / |call|


# ---- names and settings --------------------------------------------------------------------------------------------

SETTINGS = OptimiseConfig(clip=0.3, clip_high=0.4, gamma=0.9, gae_lambda=0.8, whiten=False, reference=0.5)


def test_an_algorithm_is_made_with_the_settings_that_it_names():
    assert algorithm_of(SETTINGS) == PPO(0.3, 0.4, 0.5, gamma=0.9, gae_lambda=0.8, whiten=False)
    assert algorithm_of(replace(SETTINGS, algorithm="gspo")) == GSPO(0.3, 0.4, 0.5)
    for name, kind in ALGORITHMS.items():
        made = algorithm_of(replace(SETTINGS, algorithm=name))
        assert type(made) is kind
        assert made.needs_critic == (name == "ppo")
        assert needs_group(made) == (name != "ppo")


class Bare:
    needs_critic = False

    def credit(self, experience): ...
    def loss(self, tokens): ...


class Asking(Bare):
    def __init__(self, lr, temper): ...


class Sized(Bare):
    def __init__(self, lr, mini_batch=7):
        self.given = lr, mini_batch


class NoLoss:
    needs_critic = False

    def credit(self, experience): ...


class TwoArguments(Bare):
    def loss(self, logp, advantage): ...


class WrongUnit(Bare):
    unit = "word"


class Grouped(Bare):
    needs_group = True


def not_a_class(lr): ...


INSTANCE = Bare()


def named(name, **more):
    return replace(SETTINGS, algorithm=f"{__name__}:{name}", **more)


def test_a_class_of_your_own():
    assert isinstance(algorithm_of(named("Bare")), Bare)
    assert algorithm_of(named("Sized", lr=0.25)).given == (0.25, 64)
    assert (unit_of(Bare()), needs_group(Bare())) == ("token", False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a2c", "'a2c' is not one of ppo, grpo, rloo, gspo; write module:name for your own"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        (f"{__name__}:Absent", "has no 'Absent'"),
        (f"{__name__}:LOG", "must be a class with needs_critic, credit, loss; it has no needs_critic, credit, loss"),
        (f"{__name__}:SETTINGS", "must be a class with needs_critic, credit, loss, got OptimiseConfig"),
        (f"{__name__}:not_a_class", "it has no needs_critic, credit, loss"),
        (f"{__name__}:NoLoss", "it has no loss"),
        (f"{__name__}:INSTANCE", "got Bare"),
        (f"{__name__}:Asking", "needs temper; available:"),
        (f"{__name__}:TwoArguments", "must be a method of one argument (Tokens)"),
        (f"{__name__}:WrongUnit", "must be one of token, call, episode, got 'word'"),
    ],
)
def test_wrong_names_are_one_line(name, message):
    with pytest.raises(ValueError, match=r"^optimise.algorithm: ") as error:
        algorithm_of(replace(SETTINGS, algorithm=name))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo", f"{__name__}:Grouped"])
def test_algorithms_that_compare_need_several_episodes_per_task(name):
    alone = RunConfig(optimise=replace(SETTINGS, algorithm=name, samples=1))
    with pytest.raises(ValueError, match=r"compares the episodes of a task: optimise\.samples must be 2 or more"):
        check_objective(alone)
    check_objective(replace(alone, optimise=replace(alone.optimise, samples=2)))
    check_objective(replace(alone, sampling=SamplingConfig(replay="episodes")))  # recorded: groups are what they are


def test_the_divergence_is_checked_with_the_algorithm():
    with pytest.raises(ValueError, match=r"^teacher.divergence: 'kl' is not one of"):
        check_objective(RunConfig(teacher=TeacherConfig(divergence="kl")))
