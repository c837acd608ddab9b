"""Rewards and advantages against numbers worked out by hand."""

import math

import pytest
import torch

from memopd.train.advantages import (
    explained_variance,
    gae,
    group_advantages,
    leave_one_out,
    reference_penalty,
    token_rewards,
    whiten,
)


def tensor(*values):
    return torch.tensor(values)


def test_reference_penalty_is_clamped_at_zero():
    # old − ref = 0.5, −0.5, 0
    assert reference_penalty(tensor(-1.0, -2.0, -3.0), tensor(-1.5, -1.5, -3.0)).tolist() == [0.5, 0.0, 0.0]


def test_token_rewards():
    # Two episodes: calls of 2 and 1 tokens, and one call of 2. β = 0.1.
    reward = token_rewards(
        kl_ref=tensor(0.5, 0.0, 1.0, 0.0, 2.0),
        beta=0.1,
        last=tensor(False, False, True, False, True),
        task_reward=tensor(2.0, 1.0),
        call_last=tensor(False, True, True, False, True),
        call_reward=tensor(0.25, 0.0, -0.5),
    )
    #           −0.1·0.5   0.25     2 − 0.1·1    0    1 − 0.5 − 0.1·2
    assert reward.tolist() == pytest.approx([-0.05, 0.25, 1.9, 0.0, 0.3])


def test_gae_runs_over_calls_and_ends_with_the_episode():
    # γ = 0.5, λ = 0.5, so γλ = 0.25. Episode one has three decisions (of two calls), episode two has two.
    reward = tensor(0.0, 1.0, 2.0, 0.0, 4.0)
    value = tensor(1.0, 2.0, 4.0, 8.0, 2.0)
    last = tensor(False, False, True, False, True)
    # δ = 0 + 0.5·2 − 1 = 0;  1 + 0.5·4 − 2 = 1;  2 + 0 − 4 = −2 (terminal value zero);
    #     0 + 0.5·2 − 8 = −7;  4 + 0 − 2 = 2
    # A = from behind: 2;  −7 + 0.25·2 = −6.5;   −2;  1 + 0.25·(−2) = 0.5;  0 + 0.25·0.5 = 0.125
    assert gae(reward, value, last, 0.5, 0.5).tolist() == [0.125, 0.5, -2.0, -6.5, 2.0]


def test_gae_at_one_is_the_return_to_go_less_the_value():
    reward, value = tensor(0.0, 0.5, 1.0, 3.0), tensor(0.25, 0.5, 0.75, 1.0)
    last = tensor(False, False, True, True)
    assert gae(reward, value, last, 1.0, 1.0).tolist() == [1.25, 1.0, 0.25, 2.0]


def test_group_advantages():
    # Group 0: 1, 3 (mean 2, deviation √2). Group 1 all agrees. Group 2 has one member.
    outcome, group = tensor(1.0, 0.3, 3.0, 0.3, 7.0), tensor(0, 1, 0, 1, 2)
    episode = tensor(0, 0, 1, 2, 3, 4)  # the first has two decisions
    low = -1 / math.sqrt(2)
    expected = [low, low, 0.0, -low, 0.0, 0.0]
    assert group_advantages(outcome, group, episode).tolist() == pytest.approx(expected)


def test_a_group_that_agrees_up_to_rounding_teaches_nothing():
    # The float32 mean of three 0.1 is not 0.1: dividing by the deviation would make the rounding a lesson.
    assert group_advantages(torch.full((3,), 0.1), torch.zeros(3), torch.arange(3)).tolist() == [0.0, 0.0, 0.0]


def test_leave_one_out():
    # Group 0: 1, 3, 8: the others' means are 5.5, 4.5, 2. Group 1 agrees. Group 2 has one member.
    outcome, group = tensor(1.0, 0.3, 3.0, 0.3, 7.0, 8.0), tensor(0, 1, 0, 1, 2, 0)
    episode = tensor(0, 0, 1, 2, 3, 4, 5)  # the first has two decisions
    expected = [-4.5, -4.5, 0.0, -1.5, 0.0, 0.0, 6.0]
    assert leave_one_out(outcome, group, episode).tolist() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_less_one():
    outcome, group = torch.rand(12, dtype=torch.float64), torch.arange(12) % 3
    centred = outcome - outcome.view(4, 3).mean(0)[group]
    torch.testing.assert_close(leave_one_out(outcome, group, torch.arange(12)), centred * 4 / 3)


def test_whiten():
    # Mean 2, variance ((−1)² + 0 + 1²) / 2 = 1.
    assert whiten(tensor(1.0, 2.0, 3.0)).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert whiten(tensor(5.0)).tolist() == [0.0]
    assert whiten(torch.full((1000,), 0.1)).abs().max() < 1e-3  # equal advantages, whatever their mean rounds to


def test_explained_variance():
    target = tensor(1.0, 2.0, 3.0)
    assert explained_variance(target, target) == 1.0
    assert explained_variance(tensor(2.0, 2.0, 2.0), target) == 0.0
    assert explained_variance(tensor(3.0, 2.0, 1.0), target) == -3.0  # errors −2, 0, 2: variance 4 against 1
    assert explained_variance(target, tensor(1.0, 1.0, 1.0)) == 0.0  # nothing to explain
