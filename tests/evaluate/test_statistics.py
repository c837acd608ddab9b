"""Hand-worked means, spreads and comparisons."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd.evaluate import Estimate, over_seeds, over_tasks, paired_bootstrap


def test_standard_error_and_standard_deviation():
    # mean 3; squares 4 + 1 + 0 + 1 + 4 = 10; s² = 10/4
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert over_seeds(values) == Estimate(3, pytest.approx(2.5**0.5), 5)
    assert over_tasks(values) == Estimate(3, pytest.approx(0.5**0.5), 5)  # √(2.5 / 5)


def test_one_value_has_no_spread():
    assert over_tasks([2.0]) == over_seeds([2.0]) == Estimate(2, None, 1)
    with pytest.raises(ValueError, match="no values"):
        over_tasks([])


def scores(*values: float) -> dict[str, float]:
    return {f"t{i}": value for i, value in enumerate(values)}


def test_bootstrap_equals_all_resamples_of_three_tasks():
    # Differences 2, 1, -1. All 27 resamples are equally likely; a large sample of them must find the same shares.
    a, b = scores(2, 1, 0), scores(0, 0, 1)
    sums = np.array([sum(draw) for draw in product([2, 1, -1], repeat=3)])
    got = paired_bootstrap(a, b, resamples=200_000)
    assert got.difference == pytest.approx(2 / 3)
    assert (got.low, got.high) == (pytest.approx(-1), pytest.approx(2))  # 1 of 27 is more than 2.5 %, at both ends
    assert got.tasks == 3
    # The share at or under 0: sums -3 (1), -1 and 0 (3 + 3): 7 of 27. Four standard errors of 200,000 draws.
    assert (sums <= 0).sum() == 7
    assert got.p == pytest.approx(2 * 7 / 27, abs=2 * 4 * (7 / 27 * 20 / 27 / 200_000) ** 0.5)


def test_bootstrap_is_deterministic_and_does_not_depend_on_order():
    rng = np.random.default_rng(0)
    a, b = scores(*rng.random(50)), scores(*rng.random(50))
    first = paired_bootstrap(a, b)
    assert first == paired_bootstrap(dict(reversed(a.items())), b)
    assert first != paired_bootstrap(a, b, seed=1)


def test_bootstrap_of_the_same_system_is_no_difference():
    a = scores(0, 1, 2, 1)
    got = paired_bootstrap(a, a)
    assert (got.difference, got.low, got.high, got.p) == (0, 0, 0, 1)


def test_bootstrap_pairs_the_tasks():
    # Tasks vary by 10, the systems differ by 0.1 on each: unpaired this would be lost.
    b = {f"t{i}": float(i) for i in range(10)}
    got = paired_bootstrap({task: value + 0.1 for task, value in b.items()}, b, resamples=999)
    assert (got.low, got.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert got.p == pytest.approx(2 / 1000)


def test_bootstrap_wants_the_same_tasks():
    with pytest.raises(ValueError, match="different tasks: 1 were run by one only, for example 't2'"):
        paired_bootstrap(scores(1, 2, 3), scores(1, 2))
    with pytest.raises(ValueError, match="no tasks"):
        paired_bootstrap({}, {})


def test_bootstrap_in_many_pieces(monkeypatch):
    monkeypatch.setattr("memopd.evaluate.statistics._CHUNK", 7)
    got = paired_bootstrap(scores(1, 2, 3), scores(0, 0, 0), resamples=101)
    assert got.difference == 2
    assert 1 <= got.low <= got.high <= 3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20))
def test_swapping_the_systems_swaps_the_signs(pairs):
    a, b = scores(*(x for x, _ in pairs)), scores(*(y for _, y in pairs))
    there, back = paired_bootstrap(a, b, resamples=200), paired_bootstrap(b, a, resamples=200)
    assert there.difference == -back.difference
    assert there.low == pytest.approx(-back.high, abs=1e-12)
    assert there.p == back.p
    assert there.low <= there.high
