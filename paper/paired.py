"""Two systems with the same seeds: does one lead in every pair? Pure functions of numbers.

Five seeds are few: the exact test can never say less than 2 / 2⁵ = 0.0625, so Student's test stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np


@dataclass(frozen=True, slots=True)
class Paired:
    """Of the differences a - b, one a seed."""

    differences: tuple[float, ...]
    mean: float
    low: float | None  # 95 % interval of the mean, by Student's t; None where the differences have no spread
    high: float | None
    p: float | None  # two-sided, Student's paired test; None likewise
    p_signs: float  # two-sided, exact: all 2ⁿ ways to swap the names of a pair
    ahead: int  # seeds in which a leads


def paired_test(differences: Sequence[float]) -> Paired:
    """
    >>> paired_test([1, 2, 3, 4, 5]).p_signs  # 2 of 32
    0.0625
    """
    d = np.asarray(differences, np.float64)
    if not len(d):
        raise ValueError("there are no pairs to compare")
    n, mean = len(d), float(d.mean())
    low = high = p = None
    error = float(d.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    if error > 1e-12 * abs(mean):  # equal differences, up to rounding, say nothing of how they would scatter
        half = student_quantile(0.975, n - 1) * error
        low, high, p = mean - half, mean + half, 2 * student_tail(abs(mean) / error, n - 1)
    return Paired(tuple(d.tolist()), mean, low, high, p, _sign_flips(d), int((d > 0).sum()))


def _sign_flips(d: np.ndarray) -> float:
    signs = np.array(list(product((1, -1), repeat=len(d))))
    sums = np.abs(signs @ d)
    return float((sums >= abs(d.sum()) * (1 - 1e-12)).mean())


def student_tail(t: float, freedom: int) -> float:
    """P(T > t) for t ≥ 0 and whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).

    >>> round(student_tail(2.776445, 4), 6)
    0.025
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for i in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return max(0.0, (1 - inside) / 2)


def student_quantile(level: float, freedom: int) -> float:
    """The t with P(T ≤ t) = level, for levels above one half; by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > 1 - level else (low, middle)
    return (low + high) / 2
