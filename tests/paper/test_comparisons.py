import math

import pytest

from paper.comparisons import paired_test, student_quantile, student_tail


@pytest.mark.parametrize(
    ("level", "freedom", "t"),  # from printed tables
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 9, 2.262), (0.95, 10, 1.812)],
)
def test_student_quantiles(level, freedom, t):
    assert student_quantile(level, freedom) == pytest.approx(t, abs=6e-4)
    assert student_tail(student_quantile(level, freedom), freedom) == pytest.approx(1 - level, abs=1e-9)


def test_by_hand():
    """d = 1, 2, 3: mean 2, s = 1, t = 2 √3 = 3.4641; with 2 degrees of freedom P = (1 - t / √(2 + t²)) / 2."""
    found = paired_test([1.0, 2.0, 3.0])
    t = 2 * math.sqrt(3)
    assert found.mean == 2
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.p_signs == 2 / 8
    assert found.ahead == 3


def test_no_spread_no_test():
    for same in ([0.0, 0.0], [-0.1, -0.1, -0.1], [0.5]):
        found = paired_test(same)
        assert (found.p, found.low, found.high) == (None, None, None)
    assert paired_test([1.0, -1.0]).p == paired_test([1.0, -1.0]).p_signs == 1.0
    with pytest.raises(ValueError, match="no pairs"):
        paired_test([])
