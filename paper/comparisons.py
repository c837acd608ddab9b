"""Compares two systems: over seeds, whether one leads in every pair; over tasks, whether the difference is certain.

Five seeds are few: the p of the exact test is at least 2 / 2⁵ = 0.0625, so we also report Student's test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.output import markdown_table
from memopd.evaluate import Measures, compare
from memopd.evaluate.summary import Metric, by_task

# Metric -> heading, unit, digits. The units are the paper's.
COMPARED: dict[Metric, tuple[str, float, int]] = {
    "em": ("EM", 1, 3),
    "f1": ("F1", 1, 3),
    "valid": ("valid %", 1e-2, 1),
    "peak": ("peak ×10²", 1e2, 2),
    "dependency": ("dependency ×10⁵", 1e5, 3),
}
COSTS = ("peak", "dependency")  # the lower one is ahead
Runs = dict[int, list[Measures]]  # seed -> tasks


def compared(of_a: tuple[str, Runs], of_b: tuple[str, Runs], k: int, b_is_trained: bool) -> list[dict[str, Any]]:
    """a - b on the seeds that both have. A system that is not trained and has one run is compared with every seed."""
    (a, mine), (b, theirs) = of_a, of_b
    if not b_is_trained and theirs.keys() == {0}:
        theirs = dict.fromkeys(mine, theirs[0])
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return []
    lines = []
    for metric in COMPARED:
        means = [(mean_of(mine[s], metric), mean_of(theirs[s], metric)) for s in seeds]
        mean_a, mean_b = (sum(pair[i] for pair in means) / len(seeds) for i in (0, 1))
        tasks = compare([m for s in seeds for m in mine[s]], [m for s in seeds for m in theirs[s]], metric)
        lines.append(
            {
                "a": a, "b": b, "k": k, "metric": metric, "seeds": seeds,
                "difference": mean_a - mean_b, "relative": (mean_a / mean_b - 1) if mean_b else None,
                "over_tasks": asdict(tasks), "over_seeds": asdict(paired_test([x - y for x, y in means])),
            }
        )  # fmt: skip
    return lines


def mean_of(measures: Sequence[Measures], metric: Metric) -> float:
    values = by_task(measures, metric)
    assert values is not None  # these are always recorded
    return sum(values.values()) / len(values)


def comparison_table(lines: Sequence[dict[str, Any]]) -> str:
    rows = []
    for c in lines:
        seeds, tasks = c["over_seeds"], c["over_tasks"]
        heading, unit, digits = COMPARED[c["metric"]]
        interval = "–" if seeds["low"] is None else difference(seeds["low"], seeds["high"], unit=unit, digits=digits)
        student = "–" if seeds["p"] is None else f"{seeds['p']:.4f}"
        relative = "–" if c["relative"] is None else f"{100 * c['relative']:+.1f} %"
        rows.append([
            f"{c['a']} − {c['b']}", f"Q{c['k']} {heading}", difference(c["difference"], unit=unit, digits=digits),
            relative, f"{seeds_ahead(c)} of {len(c['seeds'])}", interval, student, f"{seeds['p_signs']:.4f}",
            difference(tasks["low"], tasks["high"], unit=unit, digits=digits), f"{tasks['p']:.4f}",
        ])  # fmt: skip
    heads = ["systems", "measure", "difference", "relative", "seeds ahead", "95 % over seeds", "p, Student",
             "p, exact signs", "95 % over tasks", "p, bootstrap"]  # fmt: skip
    return markdown_table(heads, rows)


def difference(*values: float, unit: float = 1, digits: int = 3) -> str:
    """
    >>> difference(-20.0, 35.0, unit=100, digits=2)
    '-0.20 to +0.35'
    """
    return " to ".join(f"{value / unit:+.{digits}f}" for value in values)


def seeds_ahead(line: dict[str, Any]) -> int:
    """The seeds in which a is better than b; for a cost, lower is better."""
    sign = -1 if line["metric"] in COSTS else 1
    return sum(sign * d > 0 for d in line["over_seeds"]["differences"])


def comparison_caption(lines: Sequence[dict[str, Any]]) -> str:
    seeds = max(len(c["seeds"]) for c in lines)
    return (
        "Seeds are paired: same initialisation, same order of the data, same sampling seeds in evaluation. Over seeds: "
        f"Student's paired test and the exact test of signs, which with {seeds} seeds cannot say less than "
        f"{2 / 2**seeds:.4g}. Against a system that has one run they leave out how that run would scatter. Over tasks: "
        "paired bootstrap, each task's score averaged over the seeds. All tests are two-sided."
        + (" Ahead in peak or dependency is who has less." if any(c["metric"] in COSTS for c in lines) else "")
    )


# ---- from comparisons to answers ----------------------------------------------------------------------------------


def orders(lines: Sequence[dict[str, Any]], claims: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Whether a is above b in F1: all seeds ahead, and the interval over tasks above 0."""
    return [
        _order(line, "f1", line["over_tasks"]["low"] > 0)
        for line in lines
        if line["metric"] == "f1" and (line["a"], line["b"]) in claims
    ]


def shorter(lines: Sequence[dict[str, Any]], claims: Sequence[tuple[str, str]], k: int) -> list[dict[str, Any]]:
    """Whether a's peak is below b's on k questions: all seeds lower, and the interval over tasks below 0."""
    return [
        _order(line, "peak", line["over_tasks"]["high"] < 0)
        for line in lines
        if line["metric"] == "peak" and line["k"] == k and (line["a"], line["b"]) in claims
    ]


def _order(line: dict[str, Any], kind: str, is_certain: bool) -> dict[str, Any]:
    ahead, seeds = seeds_ahead(line), len(line["seeds"])
    return {"kind": kind} | {key: line.get(key) for key in ("a", "b", "k", "data", "difference")} | {
        "low": line["over_tasks"]["low"], "high": line["over_tasks"]["high"], "ahead": ahead, "seeds": seeds,
        "holds": is_certain and ahead == seeds,
    }  # fmt: skip


def grows(
    made: Sequence[dict[str, Any]], claims: Sequence[tuple[str, str]], horizons: Sequence[int]
) -> list[dict[str, Any]]:
    """Whether a's advantage per question is larger on the longest horizon than on the shortest, in all seeds.

    `made` is what `growth` makes. Where one of the two horizons is missing there is no verdict.
    """
    return [
        {
            "kind": "growth", "a": line["a"], "b": line["b"], "from": line["from"], "k": line["to"],
            "data": line.get("data"), "difference": more["mean"], "low": more["low"], "high": more["high"],
            "ahead": more["ahead"], "seeds": len(line["seeds"]), "holds": more["ahead"] == len(line["seeds"]),
            "per_question": line["per_question"],
        }
        for line in made
        for more in [line["more_per_question"]]
        if (line["a"], line["b"]) in claims and (line["from"], line["to"]) == (min(horizons), max(horizons))
    ]  # fmt: skip


ORDER_HEADS = ["order, in F1 if no other measure is named", "data", "horizon", "difference", "95 % over tasks",
               "seeds ahead"]  # fmt: skip


def orders_tables(made: Sequence[dict[str, Any]]) -> list[str]:
    """The claims that fail, then those that hold."""
    text = []
    for heading, holds in (("## Orders that do not hold", False), ("## Orders that hold", True)):
        rows = [order_row(order) for order in made if order["holds"] == holds]
        text += [heading, markdown_table(ORDER_HEADS, rows) if rows else "None."]
    return text


def order_row(o: dict[str, Any]) -> list[str]:
    a, b, data, ahead = o["a"], o["b"], o["data"] or "all", f"{o['ahead']} of {o['seeds']}"
    kind = o.get("kind", "f1")
    if kind == "growth":
        each = {int(k): value for k, value in o["per_question"].items()}
        what = f"{a}'s advantage over {b} per question grows: {difference(each[o['from']])}, {difference(each[o['k']])}"
        interval = "–" if o["low"] is None else f"{difference(o['low'], o['high'])}, over seeds"
        return [what, data, f"Q{o['from']}, Q{o['k']}", difference(o["difference"]), interval, ahead]
    what, unit, digits = f"{a} above {b}", 1.0, 3
    if kind == "peak":
        heading, unit, digits = COMPARED["peak"]
        what = f"{a} below {b} in {heading}"
    interval = difference(o["low"], o["high"], unit=unit, digits=digits)
    return [what, data, f"Q{o['k']}", difference(o["difference"], unit=unit, digits=digits), interval, ahead]


def growth(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether a's advantage in F1 grows with the horizon: per question, relative, and the largest against the smallest.

    The questions of two horizons are the same, but their tasks are not, so the test is over seeds alone.
    """
    pairs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for line in lines:
        if line["metric"] == "f1":
            pairs.setdefault((line["a"], line["b"]), {})[line["k"]] = line
    made = []
    for (a, b), by_k in pairs.items():
        short, long = min(by_k), max(by_k)
        seeds = [s for s in by_k[long]["seeds"] if s in by_k[short]["seeds"]]
        if short == long or not seeds:
            continue
        each = {k: dict(zip(c["seeds"], c["over_seeds"]["differences"], strict=True)) for k, c in by_k.items()}
        more = paired_test([each[long][s] / long - each[short][s] / short for s in seeds])
        per_question = {k: c["difference"] / k for k, c in sorted(by_k.items())}
        relative = {k: c["relative"] for k, c in sorted(by_k.items())}
        made.append(
            {"a": a, "b": b, "per_question": per_question, "relative": relative, "seeds": seeds,
             "from": short, "to": long, "more_per_question": asdict(more)}
        )  # fmt: skip
    return made


def growth_table(made: Sequence[dict[str, Any]]) -> str:
    horizons = sorted({int(k) for line in made for k in line["per_question"]})
    rows = []
    for line in made:
        per_question, relative = ({int(k): v for k, v in line[name].items()} for name in ("per_question", "relative"))
        cells = [
            "–" if k not in per_question
            else difference(per_question[k]) + ("" if relative[k] is None else f" ({100 * relative[k]:+.0f} %)")
            for k in horizons
        ]  # fmt: skip
        more = line["more_per_question"]
        interval = "–" if more["low"] is None else difference(more["low"], more["high"])
        grown = f"{more['ahead']} of {len(line['seeds'])}"
        rows.append([f"{line['a']} − {line['b']}", *cells, difference(more["mean"]), interval, grown])
    heads = [
        "F1 per question",
        *(f"Q{k}" for k in horizons),
        "longest − shortest",
        "95 % over seeds",
        "seeds that grow",
    ]
    return markdown_table(heads, rows)


# ---- the paired tests: pure functions of numbers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paired:
    """Tests of the differences a - b, one per seed."""

    differences: tuple[float, ...]
    mean: float
    low: float | None  # 95 % interval of the mean, by Student's t; None if the differences have no spread
    high: float | None
    p: float | None  # two-sided, Student's paired test; None in the same case
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
    if error > 1e-12 * abs(mean):  # differences that are equal up to rounding do not show how much they vary
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
