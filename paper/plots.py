"""Pictures of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memopd.files import whole
from paper.settings import Shown

COLOURS = {"SFT": "0.6", "PPO": "tab:orange", "persistent OPD": "tab:red", "MemOPD": "tab:blue"}
OTHER = "0.8"
CURVES = {"reward": "reward while training", "dev_em": "EM on dev tasks", "loss_opd": "divergence from the teacher"}


def systems(made: dict[str, Any], shown: Shown, output: Path) -> None:
    """F1 of every system at every horizon: bars, spreads, a dot for each seed."""
    plt = pyplot()
    figure, grid = plt.subplots(
        1, len(shown.horizons), figsize=(4 * len(shown.horizons) + 1, 3.8), layout="constrained", squeeze=False
    )
    for axes, k in zip(grid[0], shown.horizons, strict=True):
        bars(axes, made, k, "f1")
        axes.set_title(f"Q{k}")
    grid[0][0].set_ylabel(f"F1, sum over the questions ({made['settings']['split']})")
    save(figure, output)


def control(made: dict[str, Any], shown: Shown, output: Path) -> None:
    """Figure a: bars with a dot for each seed; beside them, how the arms got there."""
    plt = pyplot()
    curves = [seed for seeds in made["curves"].values() for seed in seeds.values()]
    panels = [name for name in CURVES if any(seed[name] for seed in curves)]
    width = 2 + len(panels)
    figure, (f1, em, *axes) = plt.subplots(1, width, figsize=(3.8 * width, 3.8), layout="constrained")
    for axis, metric in ((f1, "f1"), (em, "em")):
        bars(axis, made, shown.horizons[0], metric)
        axis.set_title(f"Q{shown.horizons[0]} {metric.upper()} ({made['settings']['split']})")
    for axis, name in zip(axes, panels, strict=True):
        for arm, seeds in made["curves"].items():
            curve(axis, arm, [s[name] for s in seeds.values() if s[name]])
        axis.set_title(CURVES[name])
        axis.set_xlabel("update")
        axis.legend(fontsize=8)
    save(figure, output)


def bars(axes: Any, made: dict[str, Any], k: int, metric: str) -> None:
    results = [r for r in made["results"] if r["k"] == k]
    names = [r["system"] for r in results]
    means = [r["metrics"][metric]["mean"] for r in results]
    spreads = [r["metrics"][metric]["spread"] or 0 for r in results]
    axes.bar(range(len(names)), means, yerr=spreads, capsize=3, color=[COLOURS.get(n, OTHER) for n in names], zorder=1)
    for x, name in enumerate(names):
        dots = [seed[metric] for seed in made["seeds"][f"{name}, Q{k}"].values()]
        if len(dots) > 1:
            axes.scatter(x + np.linspace(-0.15, 0.15, len(dots)), dots, s=10, color="black", zorder=2)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylim(bottom=0)


def curve(axes: Any, arm: str, seeds: list[list[list[float]]]) -> None:
    """Mean ± standard deviation over the seeds that got as far, smoothed over a twentieth of the run."""
    from paper.collect import label

    if not seeds:
        return
    steps = sorted(set.intersection(*({int(x) for x, _ in s} for s in seeds)))
    if not steps:
        return
    values = np.array([[{int(x): y for x, y in s}[step] for step in steps] for s in seeds])
    width = max(1, len(steps) // 20)
    kernel = np.ones(width)
    smooth = np.array([np.convolve(v, kernel, "same") / np.convolve(np.ones(len(v)), kernel, "same") for v in values])
    mean, spread = smooth.mean(0), smooth.std(0, ddof=1) if len(seeds) > 1 else np.zeros(len(steps))
    colour = COLOURS.get(label(arm), OTHER)
    axes.plot(steps, mean, color=colour, label=label(arm), marker="o" if len(steps) < 20 else None, ms=3)
    axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, output: Path) -> None:
    with whole(output) as partial:
        figure.savefig(partial, dpi=150, format="png")
    pyplot().close(figure)
