"""Means with their spreads, and tests of the difference between two systems. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 22  # draws in memory at once


@dataclass(frozen=True, slots=True)
class Estimate:
    """mean ± spread over n values; the spread of one value is unknown."""

    mean: float
    spread: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The mean of a minus the mean of b, on the same tasks."""

    difference: float
    low: float  # 95 % interval
    high: float
    p: float  # two-sided
    tasks: int


def over_tasks(values: Sequence[float]) -> Estimate:
    """Mean ± standard error of the mean: s / √n, with n - 1 in s.

    >>> over_tasks([1, 2, 3, 4])  # s² = 5/3
    Estimate(mean=2.5, spread=0.6454972243679028, n=4)
    """
    estimate = over_seeds(values)
    spread = None if estimate.spread is None else estimate.spread / math.sqrt(estimate.n)
    return Estimate(estimate.mean, spread, estimate.n)


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean ± standard deviation, with n - 1.

    >>> over_seeds([0.70, 0.74, 0.78]).spread  # doctest: +ELLIPSIS
    0.04...
    """
    if not values:
        raise ValueError("there are no values to average")
    array = np.asarray(values, np.float64)
    spread = float(array.std(ddof=1)) if len(array) > 1 else None
    return Estimate(float(array.mean()), spread, len(array))


def paired_bootstrap(
    a: Mapping[str, float], b: Mapping[str, float], resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Draw tasks with replacement, the same draw for both systems, since an easy task is easy for both.

    The interval is one of percentiles. p is twice the smaller share of resamples on either side of 0, where the data
    itself counts as one resample. So p is never 0, and it is 1 if the systems agree on every task.
    """
    if a.keys() != b.keys():
        only = a.keys() ^ b.keys()
        raise ValueError(
            f"the two systems were run on different tasks: {len(only)} were run by one only, for example {min(only)!r}"
        )
    if not a:
        raise ValueError("there are no tasks to compare on")
    differences = np.array([a[task] - b[task] for task in sorted(a)], np.float64)
    means = _resampled_means(differences, resamples, np.random.default_rng(seed))
    low, high = np.quantile(means, [0.025, 0.975])
    extreme = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (extreme + 1) / (resamples + 1))
    return Comparison(float(differences.mean()), float(low), float(high), p, len(differences))


def _resampled_means(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    n = len(values)
    rows = max(1, _CHUNK // n)
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    return np.concatenate([values[rng.integers(n, size=(size, n))].mean(1) for size in sizes])
