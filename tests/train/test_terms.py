"""Rewards, advantages and targets of two episodes, worked out by hand from the paper's equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memopd.config import OptimiseConfig
from memopd.train import algorithms
from memopd.train.algorithms import Credit, algorithm_of
from memopd.train.batch import mini_batch
from memopd.train.scoring import Scored
from memopd.train.terms import experience_of, make_terms
from memopd.types import Call, Episode

# Episode a: calls of two tokens (r_0 = 1/2) and of one; it earns 2. Episode b: one call of two tokens; it earns 1.
A = Episode("a", "t", [Call([1, 2], [3, 4], reward=0.5), Call([1, 5], [6])], reward=2.0)
B = Episode("b", "t", [Call([1], [2, 2])], reward=1.0)
OLD, REF = ([-1.0, -2.0, -1.0], [-1.0, -3.0]), ([-1.5, -1.0, -1.0], [-3.0, -3.0])
VALUE = ([1.0, 1.0, 1.0], [0.0, 0.5])
# KL^ref = [old − ref]+ :     1/2   0    0   |  2    0
# r̃ at β = 0.1        :   −0.05  0.5   2   | −0.2  1
PPO = OptimiseConfig(reference=0.1, gamma=1.0, gae_lambda=1.0, whiten=False)


def two_mini_batches():
    batches = [mini_batch([e], 100) for e in (A, B)]
    scored = [
        Scored(*(torch.tensor(x[i]) for x in (OLD, REF, VALUE)), np.zeros(len(batches[i]), bool)) for i in range(2)
    ]
    return batches, scored


def terms(config):
    batches, scored = two_mini_batches()
    made, summary = make_terms(batches, scored, algorithm_of(config))
    return [t.advantage.tolist() for t in made], [t.target.tolist() for t in made], summary


def test_with_a_critic():
    advantage, target, summary = terms(PPO)
    # What is still to come, r̃ summed from behind: 2.45 2.5 2 | 0.8 1; less V.
    assert target == [pytest.approx([2.45, 2.5, 2.0]), pytest.approx([0.8, 1.0])]
    assert advantage == [pytest.approx([1.45, 1.5, 1.0]), pytest.approx([0.8, 0.5])]
    assert summary["reward"] == 1.5
    assert summary["reference_kl"] == pytest.approx(
        (0.5 - 1 + 0 + 2 + 0) / 5
    )  # not clamped: what it is, not what it costs


def test_discounted():
    # γ = 1/2, λ = 1/2. δ = −0.05 + ½ − 1 = −0.55;  ½ + ½ − 1 = 0;  2 − 1 = 1  |  −0.2 + ¼ − 0 = 0.05;  1 − ½ = ½
    # A = δ + ¼ A':  −0.55 + ¼·¼ = −0.4875;  ¼;  1  |  0.05 + ⅛ = 0.175;  ½
    advantage, target, _ = terms(replace(PPO, gamma=0.5, gae_lambda=0.5))
    assert advantage == [pytest.approx([-0.4875, 0.25, 1.0]), pytest.approx([0.175, 0.5])]
    assert target == [pytest.approx([0.5125, 1.25, 2.0]), pytest.approx([0.175, 1.0])]


def test_whitened_over_both_mini_batches():
    # Mean 1.05; squares of the differences .16 .2025 .0025 .0625 .3025, over four: 0.1825. Targets stay as they are.
    advantage, target, _ = terms(replace(PPO, whiten=True))
    deviation = 0.1825**0.5
    assert advantage[0] == pytest.approx([0.4 / deviation, 0.45 / deviation, -0.05 / deviation])
    assert advantage[1] == pytest.approx([-0.25 / deviation, -0.55 / deviation])
    assert target[1] == pytest.approx([0.8, 1.0])


def test_without_a_critic():
    # Earned: 2.5 and 1, mean 1.75, deviation √(2·0.75²) = 0.75·√2. Both episodes are ±1/√2; then −β·KL^ref.
    advantage, _, summary = terms(replace(PPO, algorithm="grpo"))
    up = 0.5**0.5
    assert advantage == [pytest.approx([up - 0.05, up, up]), pytest.approx([-up - 0.2, -up])]
    assert "explained_variance" not in summary


def test_rloo():
    # Earned: 2.5 and 1; the other one's is the baseline: +1.5 and −1.5; then −β·KL^ref.
    advantage, target, summary = terms(replace(PPO, algorithm="rloo"))
    assert advantage == [pytest.approx([1.45, 1.5, 1.5]), pytest.approx([-1.7, -1.5])]
    assert target == [[0.0] * 3, [0.0] * 2]
    assert "explained_variance" not in summary


def test_gspo_has_the_credit_of_grpo():
    assert terms(replace(PPO, algorithm="gspo")) == terms(replace(PPO, algorithm="grpo"))


def test_the_spread_of_advantages_is_that_before_whitening():
    # 1.45 1.5 1 0.8 0.5: mean 1.05, variance 0.73 / 4.
    for whiten in (True, False):
        assert terms(replace(PPO, whiten=whiten))[2]["advantage_std"] == pytest.approx(0.1825**0.5)


def test_what_an_algorithm_is_given():
    """Episodes and calls are counted on over mini-batches; rewards are where they were earned."""
    given = experience_of(*two_mini_batches())
    assert given.episode.tolist() == [0, 0, 0, 1, 1]
    assert given.call.tolist() == [0, 0, 1, 2, 2]
    assert given.group.tolist() == [0, 0]
    assert given.last.tolist() == [False, False, True, False, True]
    assert given.call_last.tolist() == [False, True, True, False, True]
    assert given.penalty.tolist() == [0.5, 0.0, 0.0, 2.0, 0.0]
    assert given.rewards().tolist() == [0.0, 0.5, 2.0, 0.0, 1.0]
    assert given.rewards(0.1).tolist() == pytest.approx([-0.05, 0.5, 2.0, -0.2, 1.0])
    assert given.outcome.tolist() == [2.5, 1.0]


class Returns:
    """An algorithm that returns what it is made with."""

    def __init__(self, credit, needs_critic=False):
        self.credit, self.needs_critic = lambda experience: credit, needs_critic


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Returns(torch.zeros(5)), "credit of Returns must return memopd.train.algorithms.Credit, got Tensor"),
        (Returns(Credit(torch.zeros(2))), r"must give one advantage per sampled token, shape \[5\], got \[2\]"),
        (
            Returns(Credit(torch.zeros(5), torch.zeros(5, 1))),
            r"one target per sampled token, shape \[5\], got \[5, 1\]",
        ),
        (Returns(Credit(torch.zeros(5)), needs_critic=True), "must give the critic's targets"),
        (Returns(Credit(np.zeros(5))), r"must give advantage as a torch\.Tensor, got ndarray"),
        (Returns(Credit([0.0] * 5)), r"must give advantage as a torch\.Tensor, got list"),
        (
            Returns(Credit(torch.zeros(5), metrics={"mine": torch.ones(())})),
            "metrics as numbers, got Tensor for 'mine'",
        ),
        (Returns(Credit(torch.ones(5, dtype=torch.long))), r"advantage as floating-point numbers, got torch\.int64"),
        (
            Returns(Credit(torch.zeros(5), torch.zeros(5, dtype=torch.bool))),
            r"target as floating-point numbers, got torch\.bool",
        ),
        (
            Returns(Credit(torch.zeros(5), metrics={"step": 7.0})),
            "to its metric 'step': MemOPD writes one",
        ),
        (Returns(Credit(torch.zeros(5), metrics={"reward": 123.0})), "another name to its metric 'reward'"),
        (Returns(Credit(torch.zeros(5), metrics={"seconds_mine": 1.0})), "another name to its metric 'seconds_mine'"),
    ],
)
def test_a_wrong_credit_is_named(algorithm, message):
    with pytest.raises(ValueError, match=message):
        make_terms(*two_mini_batches(), algorithm)


def test_an_algorithm_may_measure():
    _, summary = make_terms(*two_mini_batches(), Returns(Credit(torch.arange(5.0), metrics={"mine": 3.0})))
    assert summary["mine"] == 3.0
    assert summary["advantage_std"] == pytest.approx(2.5**0.5)


def test_a_credit_with_a_gradient_is_detached():
    credit = Credit(torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True))
    made, _ = make_terms(*two_mini_batches(), Returns(credit, needs_critic=True))
    assert not any(t.advantage.requires_grad or t.target.requires_grad for t in made)


def test_a_subclass_of_ppo_may_hand_on_its_spread():
    class Mine(algorithms.PPO):
        def credit(self, experience):
            return super().credit(experience)

    assert make_terms(*two_mini_batches(), Mine(clip=0.2))[1]["advantage_std"] > 0
