"""When a failed equivalence check stops a run."""

from dataclasses import replace

import pytest
import torch
from calls import mem1_calls

from memopd.train.check import may_be_rounding
from memopd.verify import equivalence
from memopd.verify.equivalence import at_precision
from memopd.verify.families import tiny_model


@pytest.fixture(scope="module")
def report():
    model = at_precision(tiny_model("qwen2"), torch.bfloat16)
    return equivalence(model, mem1_calls(4), "dense")


def failed(report, times, **changes):
    """As if packed were so many times the tolerance away."""
    return replace(report, passed=False, error=times * report.tolerance, **changes)


def test_a_little_over_the_tolerance_in_half_precision_is_for_float32_to_decide(report):
    assert report.passed
    assert not may_be_rounding(report)
    assert may_be_rounding(failed(report, 1.03))
    assert may_be_rounding(failed(report, 1.03, dtype="float16"))


@pytest.mark.parametrize(
    "changes", [{"times": 2.1}, {"times": 1.03, "dtype": "float32"}, {"times": 1.03, "problems": ("row 3",)}]
)
def test_more_than_that_is_not(report, changes):
    assert not may_be_rounding(failed(report, **changes))
