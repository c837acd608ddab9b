"""Rewards, advantages and targets of two episodes, worked out by hand from the paper's equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memopd.config import OptimiseConfig
from memopd.train.batch import mini_batch
from memopd.train.scoring import Scored
from memopd.train.terms import make_terms
from memopd.types import Call, Episode

# Episode a: calls of two tokens (r_0 = 1/2) and of one; it earns 2. Episode b: one call of two tokens; it earns 1.
A = Episode("a", "t", [Call([1, 2], [3, 4], reward=0.5), Call([1, 5], [6])], reward=2.0)
B = Episode("b", "t", [Call([1], [2, 2])], reward=1.0)
OLD, REF = ([-1.0, -2.0, -1.0], [-1.0, -3.0]), ([-1.5, -1.0, -1.0], [-3.0, -3.0])
VALUE = ([1.0, 1.0, 1.0], [0.0, 0.5])
# KL^ref = [old − ref]+ :     1/2   0    0   |  2    0
# r̃ at β = 0.1        :   −0.05  0.5   2   | −0.2  1
PPO = OptimiseConfig(reference=0.1, gamma=1.0, gae_lambda=1.0, whiten=False)


def terms(config):
    batches = [mini_batch([e], 100) for e in (A, B)]
    scored = [
        Scored(*(torch.tensor(x[i]) for x in (OLD, REF, VALUE)), np.zeros(len(batches[i]), bool)) for i in range(2)
    ]
    made, summary = make_terms(batches, scored, config)
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
