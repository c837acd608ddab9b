"""The results of `memopd evaluate` with intervals, and their differences from the first line of each table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memopd.evaluate import Measures, Setting, compare, paired_bootstrap
from memopd.evaluate.summary import Metric, by_task
from memopd.report.runs import Run

SHOWN: tuple[Metric, ...] = ("em", "f1", "valid", "calls", "peak", "dependency", "seconds")
COMPARED: tuple[Metric, ...] = ("em", "f1", "peak")


def tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One table for every number of questions, with one line per evaluation, in the order of the runs."""
    lines: dict[int, list[dict[str, Any]]] = {}
    first: dict[int, list[Measures]] = {}
    for run in runs:
        for name, evaluation in run.evaluations.items():
            for result, seeds in zip(evaluation["results"], evaluation["tasks"], strict=True):
                measures = [Measures(**m) for seed in seeds for m in seed]
                k, line = result["k"], _line(run.name, name, result, measures)
                if k in first:
                    line["against_first"] = _against(measures, first[k])
                first.setdefault(k, measures)
                lines.setdefault(k, []).append(line)
    return [{"k": k, "lines": lines[k]} for k in sorted(lines)]


def _line(run: str, name: str, result: dict[str, Any], measures: list[Measures]) -> dict[str, Any]:
    setting = Setting(**result["setting"])
    shown = [metric for metric in SHOWN if metric != "seconds" or setting.is_alone]  # as in the tables of `evaluate`
    return {
        "run": run,
        "name": name,
        "system": result["system"],
        "tasks": result["tasks"],
        "seeds": result["seeds"],
        "grading": setting.grading,
        "engine": f"{setting.engine}, batch {setting.batch_size}",
        "metrics": {metric: _interval(measures, metric) if metric in shown else None for metric in SHOWN},
    }


def _interval(measures: list[Measures], metric: Metric) -> list[float] | None:
    """[mean, low, high]: 95 % by drawing tasks with replacement. Seeds of a task are averaged first."""
    values = by_task(measures, metric)
    if values is None:
        return None
    drawn = paired_bootstrap(
        values, dict.fromkeys(values, 0.0)
    )  # compared with 0, this is the interval of the mean itself
    return [drawn.difference, drawn.low, drawn.high]


def _against(mine: list[Measures], first: list[Measures]) -> dict[str, Any] | None:
    """Compare in pairs, if both were run on the same tasks."""
    if {m.task for m in mine} != {m.task for m in first}:
        return None
    found: dict[str, Any] = {}
    for metric in COMPARED:
        c = compare(mine, first, metric)
        found[metric] = {"difference": c.difference, "low": c.low, "high": c.high, "p": c.p}
    return found
