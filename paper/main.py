"""Table 1: SFT, PPO and MemOPD, trained on tasks of two questions and evaluated on 2, 8 and 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import markdown_table, pyplot, save
from memopd.evaluate import Result
from paper.page import Findings
from paper.settings import Shown
from paper.suite import Work
from paper.trained import (
    COLUMNS,
    Collected,
    costs,
    label,
    results_caption,
    results_table,
    settings_of,
)

COLOURS = {"SFT": "0.6", "PPO": "tab:orange", "persistent OPD": "tab:red", "MemOPD": "tab:blue"}
OTHER = "0.8"
VALID = (
    "A task whose answer has more or fewer parts than questions scores 0. So every score above is the share of tasks "
    "with a valid answer, times the score of those."
)


def findings(found: Collected, shown: Shown, work: Work) -> Findings:
    text = body(found, shown, settings_of(work))
    return Findings({}, text, lambda output: draw(found, shown, work.split, output))


def body(found: Collected, shown: Shown, settings: dict[str, Any]) -> list[str]:
    made = [results_table(found, shown, COLUMNS), results_caption(found, settings)]
    if max(shown.horizons) > 2:
        made += ["## Answers that count", valid_table(found, shown), VALID]
    return [*made, *costs(found)]


def valid_table(found: Collected, shown: Shown) -> str:
    """The two factors of a score on long tasks: the share of lists with the right length, and the score of those."""
    heads = ["system", *(f"Q{k} {heading}" for k in shown.horizons for heading in ("valid %", "F1 of the valid"))]
    rows = [
        [label(system), *(factor for k in shown.horizons for factor in _factors(found.results.get((system, k))))]
        for system in shown.systems
    ]
    return markdown_table(heads, rows)


def _factors(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "–", "–"
    valid, f1 = (result.metrics[metric].mean for metric in ("valid", "f1"))  # type: ignore[union-attr]
    return f"{100 * valid:.1f}", f"{f1 / valid:.2f}" if valid else "–"


def draw(found: Collected, shown: Shown, split: str, output: Path) -> None:
    """F1 of every system at every horizon: bars, spreads, a dot for each seed."""
    count = len(shown.horizons)
    figure, grid = pyplot().subplots(1, count, figsize=(4 * count + 1, 3.8), layout="constrained", squeeze=False)
    for axes, k in zip(grid[0], shown.horizons, strict=True):
        bars(axes, found, k, "f1")
        axes.set_title(f"Q{k}")
    grid[0][0].set_ylabel(f"F1, sum over the questions ({split})")
    save(figure, output)


def bars(axes: Any, found: Collected, k: int, metric: str) -> None:
    results = {system: r for (system, horizon), r in found.results.items() if horizon == k}
    names = [r.system for r in results.values()]
    estimates = [r.metrics[metric] for r in results.values()]  # type: ignore[index]
    means, spreads = [e.mean for e in estimates if e], [e.spread or 0 for e in estimates if e]
    axes.bar(range(len(names)), means, yerr=spreads, capsize=3, color=[COLOURS.get(n, OTHER) for n in names], zorder=1)
    for x, system in enumerate(results):
        dots = [seed[metric] for seed in found.seed_means(system, k).values()]
        if len(dots) > 1:
            axes.scatter(x + np.linspace(-0.15, 0.15, len(dots)), dots, s=10, color="black", zorder=2)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylim(bottom=0)
