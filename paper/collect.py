"""Results of the suite that are there, and what is missing; systems against each other, over tasks and over seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from memopd.evaluate import Measures, Result, Setting, compare, summarise
from memopd.evaluate.summary import Metric, by_task
from memopd.train.log import read_metrics
from paper.evaluation import Part, measured_with
from paper.paired import paired_test
from paper.settings import ARMS
from paper.suite import Work

LABELS = {"ppo": "PPO", "persistent": "persistent OPD", "memopd": "MemOPD", "student-mem1": "SFT"}
COMPARED: tuple[Metric, ...] = ("em", "f1")


@dataclass(slots=True)
class Collected:
    runs: dict[tuple[str, int], dict[int, list[Measures]]] = field(default_factory=dict)  # (system, k) -> seed -> tasks
    results: list[Result] = field(default_factory=list)
    machines: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def label(system: str) -> str:
    """What tables call a system: `teacher-mem1` is `teacher, mem1`."""
    who, _, rule = system.partition("-")
    return LABELS.get(system) or f"{ {'student': 'SFT'}.get(who, who) }, {rule}"


def collect(work: Work, systems: Sequence[str], horizons: Sequence[int]) -> Collected:
    found = Collected()
    for system in systems:
        if system in ARMS and system not in work.suite.arms:
            continue  # left out by --arms
        for k in horizons:
            settings: list[Setting] = []
            seeds = work.suite.seeds_of(system)
            runs = {seed: m for seed in seeds if (m := _read(work, system, seed, k, found, settings))}
            if runs:
                found.runs[system, k] = runs
                found.results.append(summarise(label(system), list(runs.values()), settings[0]))
    return found


def _read(
    work: Work, system: str, seed: int, k: int, found: Collected, settings: list[Setting]
) -> list[Measures] | None:
    e, file = work.suite.evaluation, work.result_of(system, seed, k)
    what = f"{label(system)}, Q{k}" if work.suite.seeds_of(system) == (0,) else f"{label(system)}, seed {seed}, Q{k}"
    if not file.is_file():
        found.missing.append(what)
        return None
    read = json.loads(file.read_text())
    part = Part(system, seed, k, read["settings"]["memory"], e.tasks.format(split=work.split, k=k), str(file))
    if read["settings"] != (asked := measured_with(part, e)):
        other = ", ".join(name for name in asked if read["settings"].get(name) != asked[name])
        found.missing.append(f"{what} (what is there was made with another {other})")
        return None
    if read["machine"] not in found.machines:
        found.machines.append(read["machine"])
    shared = f", {read['processes']} processes on it" if read["processes"] > 1 else ""
    settings.append(Setting(e.grading, read["engine"] + shared, e.batch))  # type: ignore[arg-type]
    return [Measures(**m) for m in read["measures"]]


def compared(found: Collected, a: str, b: str, k: int) -> list[dict[str, Any]]:
    """a - b on the seeds that both have. A system that has one run is compared with every seed."""
    of_a, of_b = found.runs.get((a, k), {}), found.runs.get((b, k), {})
    if b not in ARMS and of_b.keys() == {0}:
        of_b = dict.fromkeys(of_a, of_b[0])
    seeds = sorted(of_a.keys() & of_b.keys())
    if not seeds:
        return []
    lines = []
    for metric in COMPARED:
        means = {s: (_mean(of_a[s], metric), _mean(of_b[s], metric)) for s in seeds}
        mine, theirs = (sum(pair[i] for pair in means.values()) / len(seeds) for i in (0, 1))
        tasks = compare([m for s in seeds for m in of_a[s]], [m for s in seeds for m in of_b[s]], metric)
        lines.append(
            {
                "a": label(a), "b": label(b), "k": k, "metric": metric, "seeds": seeds,
                "difference": mine - theirs, "relative": (mine / theirs - 1) if theirs else None,
                "over_tasks": asdict(tasks), "over_seeds": asdict(paired_test([x - y for x, y in means.values()])),
            }
        )  # fmt: skip
    return lines


def seed_means(found: Collected, system: str, k: int) -> dict[str, dict[str, float]]:
    runs = found.runs.get((system, k), {})
    return {str(s): {metric: _mean(m, metric) for metric in COMPARED} for s, m in runs.items()}


def _mean(measures: Sequence[Measures], metric: Metric) -> float:
    values = by_task(measures, metric)
    assert values is not None  # EM and F1 always are
    return sum(values.values()) / len(values)


def curves(work: Work) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """arm -> seed -> metric -> [update, value], as training logged them."""
    made: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    for arm in work.arms:
        for seed in work.suite.seeds:
            if lines := read_metrics(work.run_of(arm, seed)):
                made.setdefault(arm, {})[str(seed)] = {
                    name: [[line["step"] + 1, line[name]] for line in lines if line.get(name) is not None]
                    for name in ("reward", "em", "dev_em", "dev_f1", "entropy", "loss_opd")
                }
    return made
