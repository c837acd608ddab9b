"""Figure a: no teacher, a teacher in persistent states, and a teacher in aligned states, with learning curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import pyplot, save
from memopd.train.metrics import read_metrics
from paper.main import COLOURS, OTHER, bars
from paper.page import Findings
from paper.settings import Shown
from paper.suite import Work
from paper.trained import COLUMNS, Collected, label, results_caption, results_table, settings_of

Curves = dict[str, dict[str, dict[str, list[list[float]]]]]  # arm -> seed -> metric -> [update, value]
LOGGED = ("reward", "em", "dev_em", "dev_f1", "entropy", "loss_opd")
DRAWN = {"reward": "reward while training", "dev_em": "EM on dev tasks", "loss_opd": "divergence from the teacher"}


def findings(found: Collected, shown: Shown, work: Work) -> Findings:
    curves = curves_of(work)
    text = body(found, shown, settings_of(work))
    return Findings(
        {"curves": curves}, text, lambda output: _draw(found, curves, shown.horizons[0], work.split, output)
    )


def body(found: Collected, shown: Shown, settings: dict[str, Any]) -> list[str]:
    return [results_table(found, shown, COLUMNS), results_caption(found, settings)]


def curves_of(work: Work) -> Curves:
    """The metrics that training logged."""
    made: Curves = {}
    for arm in work.arms:
        for seed in work.suite.seeds:
            if lines := read_metrics(work.run_of(arm, seed)):
                made.setdefault(arm, {})[str(seed)] = {
                    name: [[line["step"] + 1, line[name]] for line in lines if line.get(name) is not None]
                    for name in LOGGED
                }
    return made


def _draw(found: Collected, curves: Curves, k: int, split: str, output: Path) -> None:
    """Bars with a dot for each seed; beside them, the curves that have points."""
    logged = [seed for seeds in curves.values() for seed in seeds.values()]
    panels = [name for name in DRAWN if any(seed[name] for seed in logged)]
    width = 2 + len(panels)
    figure, (f1, em, *axes) = pyplot().subplots(1, width, figsize=(3.8 * width, 3.8), layout="constrained")
    for axis, metric in ((f1, "f1"), (em, "em")):
        bars(axis, found, k, metric)
        axis.set_title(f"Q{k} {metric.upper()} ({split})")
    for axis, name in zip(axes, panels, strict=True):
        for arm, seeds in curves.items():
            draw_curve(axis, label(arm), [s[name] for s in seeds.values() if s[name]])
        axis.set_title(DRAWN[name])
        axis.set_xlabel("update")
        axis.legend(fontsize=8)
    save(figure, output)


def draw_curve(axes: Any, name: str, seeds: list[list[list[float]]]) -> None:
    """Mean ± standard deviation over the seeds, at the steps that all have, smoothed over a twentieth of the run."""
    if not seeds:
        return
    steps = sorted(set.intersection(*({int(x) for x, _ in s} for s in seeds)))
    if not steps:
        return
    values = np.array([[{int(x): y for x, y in s}[step] for step in steps] for s in seeds])
    kernel = np.ones(max(1, len(steps) // 20))
    smooth = np.array([np.convolve(v, kernel, "same") / np.convolve(np.ones(len(v)), kernel, "same") for v in values])
    mean, spread = smooth.mean(0), smooth.std(0, ddof=1) if len(seeds) > 1 else np.zeros(len(steps))
    colour = COLOURS.get(name, OTHER)
    axes.plot(steps, mean, color=colour, label=name, marker="o" if len(steps) < 20 else None, ms=3)
    axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)
