"""Losses against numbers worked out by hand; each is a sum, and its gradient is what learning follows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopd.score.head import Head
from memopd.score.vocabulary import reference_scores
from memopd.train.losses import (
    approximate_kl,
    distillation_loss,
    entropy_bonus,
    importance_weights,
    outside,
    policy_loss,
    value_loss,
)

LOG = math.log


def tensor(*values, **options):
    return torch.tensor(values, **options)


def test_policy_loss_and_where_its_gradient_stops():
    # ε = 0.2. ϱ = 1.5 and 0.5, each with both signs of A, then ϱ = 1.1 inside the clip.
    logp_old = tensor(*[-1.0] * 5)
    logp = tensor(*(-1.0 + LOG(r) for r in (1.5, 1.5, 0.5, 0.5, 1.1)), requires_grad=True)
    advantage = tensor(2.0, -2.0, 2.0, -2.0, 3.0)
    # min(3, 2.4) = 2.4;  min(−3, −2.4) = −3;  min(1, 1.6) = 1;  min(−1, −1.6) = −1.6;  3.3
    loss = policy_loss(logp, logp_old, advantage, 0.2, 0.2)
    assert loss.item() == pytest.approx(-(2.4 - 3 + 1 - 1.6 + 3.3))
    loss.backward()
    # dϱ/dℓ = ϱ, so −ϱA where the ratio itself is the minimum, and 0 where the clip is.
    assert logp.grad.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -3.3])


def test_importance_weights_are_truncated_ratios():
    # π_old / μ = 0.5 / 0.25 = 2, the limit itself;  0.1 / 0.4 = ¼;  0.9 / 0.3 = 3, cut to 2;  the same policy: 1
    old = tensor(LOG(0.5), LOG(0.1), LOG(0.9), LOG(0.7), requires_grad=True)
    weights = importance_weights(old, tensor(LOG(0.25), LOG(0.4), LOG(0.3), LOG(0.7)))
    assert weights.tolist() == pytest.approx([2.0, 0.25, 2.0, 1.0])
    assert not weights.requires_grad


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 4), min_size=1, max_size=5))
def test_a_weighted_advantage_is_a_weighted_loss(drawn):
    """So the weights need no place of their own in an algorithm: −min(ϱwA, clip(ϱ)wA) = −w·min(ϱA, clip(ϱ)A)."""
    logp, old, sampled, advantage = torch.tensor(drawn, dtype=torch.float64).T
    weights = importance_weights(old, sampled)
    each = [policy_loss(*(v[None] for v in token), 0.2, 0.28) for token in zip(logp, old, advantage, strict=True)]
    expected = sum(w * loss for w, loss in zip(weights, each, strict=True))
    found = policy_loss(logp, old, weights * advantage, 0.2, 0.28)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


def test_the_upper_clip_may_be_another():
    # ε = 0.2 below, 0.28 above. ϱ = 1.25 is now inside, 1.5 outside, 0.5 outside as before.
    logp = tensor(*(LOG(r) for r in (1.25, 1.5, 0.5)), requires_grad=True)
    advantage = tensor(2.0, 2.0, -2.0)
    # min(2.5, 2.5) = 2.5;  min(3, 2.56) = 2.56;  min(−1, −1.6) = −1.6
    loss = policy_loss(logp, torch.zeros(3), advantage, 0.2, 0.28)
    assert loss.item() == pytest.approx(-(2.5 + 2.56 - 1.6))
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([-2.5, 0.0, 0.0])


def test_value_loss_takes_the_worse_of_the_two():
    # ε_V = 0.5. V_old = 1; R = 2.
    value = tensor(1.25, 3.0, 0.0, requires_grad=True)
    loss = value_loss(value, tensor(1.0, 1.0, 1.0), tensor(2.0, 2.0, 2.0), 0.5)
    # inside: 0.75² = 0.5625;  3 → clipped 1.5: max(1, 0.25) = 1;  0 → clipped 0.5: max(4, 2.25) = 4; half of the sum
    assert loss.item() == pytest.approx(0.5 * (0.5625 + 1 + 4))
    loss.backward()
    assert value.grad.tolist() == pytest.approx([-0.75, 1.0, -2.0])
    # V = 2.2 with V_old = 1: itself 0.04, clipped to 1.5 0.25: the clipped one, which has no gradient
    value = tensor(2.2, requires_grad=True)
    loss = value_loss(value, tensor(1.0), tensor(2.0), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.125)
    assert value.grad.tolist() == [0.0]


def test_distillation_is_over_its_own_mask():
    divergence = tensor(0.5, 1.0, 2.0, requires_grad=True)
    loss = distillation_loss(divergence, tensor(True, False, True))
    loss.backward()
    assert loss.item() == 2.5
    assert divergence.grad.tolist() == [1.0, 0.0, 1.0]


def test_divergence_entropy_and_log_p_from_logits():
    # p = (1/2, 1/2), p_T = (1/4, 3/4): KL = ½ log 2 + ½ log ⅔ = ½ log 4/3.
    z = tensor(0.0, 0.0, requires_grad=True)
    teacher = Head(torch.eye(2), None)
    logp, entropy, kl = reference_scores(
        Head(torch.eye(2), None), z[None], tensor(1), 1.0, teacher, tensor(0.0, LOG(3))[None]
    )
    assert (logp.item(), entropy.item()) == (pytest.approx(-LOG(2)), pytest.approx(LOG(2)))
    assert kl.item() == pytest.approx(0.5 * LOG(4 / 3))
    # d KL / dz = p (log p − log p_T − KL): ½ (log 2 − ½ log 4/3) = ¼ log 3, and the same with a minus.
    kl.backward()
    assert z.grad.tolist() == pytest.approx([0.25 * LOG(3), -0.25 * LOG(3)])
    # At temperature 2 the teacher's odds are √3: p_T = (1, √3) / (1 + √3).
    *_, warm = reference_scores(Head(torch.eye(2), None), z[None], tensor(1), 2.0, teacher, tensor(0.0, LOG(3))[None])
    a, b = 1 / (1 + math.sqrt(3)), math.sqrt(3) / (1 + math.sqrt(3))
    assert warm.item() == pytest.approx(0.5 * LOG(0.5 / a) + 0.5 * LOG(0.5 / b))


def test_an_empty_teacher_mask_gives_zero_and_no_gradient_even_of_what_is_not_a_number():
    divergence = tensor(float("nan"), float("inf"), requires_grad=True)
    loss = distillation_loss(divergence, tensor(False, False))
    loss.backward()
    assert loss.item() == 0.0
    assert divergence.grad.tolist() == [0.0, 0.0]


def test_entropy():
    assert entropy_bonus(tensor(LOG(2), LOG(4))).item() == pytest.approx(LOG(8))


def test_ratios_outside_the_clip_are_found_on_both_sides():
    log_ratio = tensor(*(LOG(r) for r in (0.7, 0.85, 1.0, 1.15, 1.25, 1.3)))
    assert outside(log_ratio, 0.2, 0.2).tolist() == [True, False, False, False, True, True]
    assert outside(log_ratio, 0.2, 0.28).tolist() == [True, False, False, False, False, True]
    assert outside(log_ratio, 0.1, 0.28).tolist() == [True, True, False, False, False, True]


def test_approximate_kl_is_k3():
    # ϱ = 2: 1 − log 2.  ϱ = 1/2: −1/2 + log 2.  ϱ = 1: 0.
    assert approximate_kl(tensor(LOG(2), -LOG(2), 0.0), torch.zeros(3)).item() == pytest.approx(0.5)
    assert approximate_kl(tensor(1e-4), torch.zeros(1)).item() == pytest.approx(5e-9, rel=1e-2)  # not cancelled
