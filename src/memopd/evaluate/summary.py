"""Summarises the measures of many episodes as one line of the paper's tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from memopd.evaluate.metrics import Measures
from memopd.evaluate.statistics import Comparison, Estimate, over_seeds, over_tasks, paired_bootstrap
from memopd.tasks.grading import Grading

Metric: TypeAlias = Literal[
    "em",
    "f1",
    "valid",
    "calls",
    "peak",
    "peak_without_q",
    "peak_without_q_em0_dropped",  # MEM1's evaluation averages it over the trajectories with EM > 0 alone
    "dependency",
    "dependency_without_q",
    "seconds",
]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions, besides the system, that the numbers depend on."""

    grading: Grading
    engine: str  # seconds depend on it
    batch_size: int  # seconds also depend on how many trajectories ran at once
    processes: int = 1  # and on how many processes shared the machine

    @property
    def is_alone(self) -> bool:
        """Whether a trajectory had the engine to itself, so that its seconds are its own."""
        return self.batch_size == self.processes == 1


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one system on tasks of one k."""

    system: str
    k: int
    setting: Setting
    tasks: int
    seeds: int  # if more than one, spreads are standard deviations over seeds, else standard errors over tasks
    metrics: dict[Metric, Estimate | None]  # None if not recorded

    def as_dict(self) -> dict[str, Any]:
        spread = "standard deviation over seeds" if self.seeds > 1 else "standard error over tasks"
        return {**asdict(self), "spread": spread}


def summarise(system: str, runs: Sequence[Sequence[Measures]], setting: Setting) -> Result:
    """Average one run (± standard error over its tasks), or one run per seed (± standard deviation of their means)."""
    horizons = {m.k for run in runs for m in run}
    if len(horizons) != 1:
        raise ValueError(f"{system}: a line needs tasks of one k, got k = {sorted(horizons)}")
    tasks = {m.task for m in runs[0]}
    for run in runs[1:]:
        if other := tasks ^ {m.task for m in run}:
            raise ValueError(f"{system}: seeds were run on different tasks: {min(other)!r} is not in all of them")
    metrics = {metric: _estimate(runs, metric) for metric in METRICS}
    return Result(system, horizons.pop(), setting, len(tasks), len(runs), metrics)


def compare(a: Sequence[Measures], b: Sequence[Measures], metric: Metric = "em", seed: int = 0) -> Comparison:
    """Paired bootstrap of a - b over tasks. Both must have been run on the same tasks."""
    values = [by_task(run, metric) for run in (a, b)]
    if values[0] is None or values[1] is None:
        raise ValueError(f"{metric} was not recorded for every episode")
    return paired_bootstrap(values[0], values[1], seed=seed)


def by_task(measures: Sequence[Measures], metric: Metric) -> dict[str, float] | None:
    """The metric of every task, averaged over its episodes, which are not independent. None if not recorded, or if
    every episode is dropped."""
    name: str = metric
    if metric == "peak_without_q_em0_dropped":
        name, measures = "peak_without_q", [m for m in measures if m.em > 0]
        if not measures:
            return None
    values: dict[str, list[float]] = defaultdict(list)
    for m in measures:
        value = getattr(m, name)
        if value is None:
            return None
        values[m.task].append(float(value))
    return {task: sum(of_task) / len(of_task) for task, of_task in values.items()}


def _estimate(runs: Sequence[Sequence[Measures]], metric: Metric) -> Estimate | None:
    values = [by_task(run, metric) for run in runs]
    of_runs = [list(of_run.values()) for of_run in values if of_run is not None]
    if len(of_runs) < len(runs):
        return None
    if len(runs) == 1:
        return over_tasks(of_runs[0])
    return over_seeds([sum(run) / len(run) for run in of_runs])
