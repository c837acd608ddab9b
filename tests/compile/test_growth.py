"""The compiler's work grows with the calls, not with their square, and its memory is a small multiple of the calls'."""

import tracemalloc

import numpy as np
from work import function_calls

from benchmarks.shapes import Shape, rewriting
from memopd.compile import compile_calls

SHAPE = Shape(calls=16, trajectories=1, q=500, x=350, a=150)  # about 1,000 tokens per call


def calls_of(episodes):
    rng = np.random.default_rng(0)
    return [call for i in range(episodes) for call in rewriting(rng, str(i), SHAPE).calls]


def growth(work):
    """How much more `work` does on ten times as many calls."""
    few, many = calls_of(2), calls_of(20)
    return function_calls(lambda: work(many)) / function_calls(lambda: work(few))


def test_ten_times_the_calls_are_ten_times_the_work():
    assert growth(compile_calls) <= 10.5


def test_the_square_would_be_noticed():
    def all_pairs(calls):
        return sum(bool(np.array_equal(a.prompt[:1], b.prompt[:1])) for a in calls for b in calls)

    assert growth(all_pairs) > 90


def test_memory_is_a_small_multiple_of_the_calls():
    for calls in (calls_of(16), calls_of(160)):
        tracemalloc.start()
        packed = compile_calls(calls)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 4 * sum(c.prompt.nbytes + c.completion.nbytes for c in calls)
        assert len(packed) < sum(len(c.path) for c in calls)
