"""Collects the suite's results for main, single and control, lists the missing ones, and makes their tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table
from memopd.evaluate import Measures, Result, Setting, summarise
from memopd.evaluate.summary import Metric
from memopd.evaluate.tables import shown as cell
from paper.comparisons import COMPARED, compared, comparison_caption, comparison_table, mean_of
from paper.evaluation import Part, measured_with
from paper.page import Findings, provenance, write_page
from paper.settings import ARMS, Shown
from paper.suite import Work

LABELS = {"ppo": "PPO", "persistent": "persistent OPD", "memopd": "MemOPD", "student-mem1": "SFT"}
Column = tuple[str, Metric, float, int]  # heading, metric, unit, digits
COLUMNS: tuple[Column, ...] = (  # those of the paper's Tables 1 and 2
    ("EM ↑", "em", 1, 3),
    ("F1 ↑", "f1", 1, 3),
    ("peak ↓ ×10²", "peak", 1e2, 2),
    ("time ↓ s", "seconds", 1, 2),
)


@dataclass(slots=True)
class Collected:
    """The results by system and horizon."""

    runs: dict[tuple[str, int], dict[int, list[Measures]]] = field(default_factory=dict)  # seed -> tasks
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    machines: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def seed_means(self, system: str, k: int) -> dict[int, dict[str, float]]:
        runs = self.runs.get((system, k), {})
        return {seed: {metric: mean_of(m, metric) for metric in COMPARED} for seed, m in runs.items()}


def show(name: str, shown: Shown, work: Work, failed: dict[str, str], output: Path) -> list[Path]:
    """Write OUTPUT/NAME.json, .md and .png from the results that exist."""
    found = collect(work, shown.systems, shown.horizons)
    if not found.results:
        raise ValueError(f"{work.folder}: there is no result yet; the first missing one is {found.missing[0]}")
    own: Findings = import_module(f"paper.{name}").findings(found, shown, work)
    comparisons = [
        line | {"a": label(a), "b": label(b)}
        for a, b in shown.compare
        for k in shown.horizons
        for line in compared((a, found.runs.get((a, k), {})), (b, found.runs.get((b, k), {})), k)
    ]
    numbers = {
        "results": [r.as_dict() for r in found.results.values()],
        "seeds": {f"{label(s)}, Q{k}": found.seed_means(s, k) for s in shown.systems for k in shown.horizons},
        "comparisons": comparisons,
        "missing": [*found.missing, *(f"{job} failed: {why}" for job, why in failed.items())],
    }
    body = own.body
    if comparisons:
        body = [*body, "## Against each other", comparison_table(comparisons), comparison_caption(comparisons)]
    settings = {"split": work.split, "overrides": dict(work.overrides), **asdict(work.suite)}
    made = provenance(found.machines, settings)
    return write_page(name, shown, made, Findings(numbers | own.numbers, body, own.draw), output)


def label(system: str) -> str:
    """The name of a system in tables: `teacher-mem1` is `teacher, mem1`."""
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
                found.results[system, k] = summarise(label(system), list(runs.values()), settings[0])
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
        found.missing.append(f"{what} (the existing result has another {other})")
        return None
    if read["machine"] not in found.machines:
        found.machines.append(read["machine"])
    shared = f", {read['processes']} processes on it" if read["processes"] > 1 else ""
    settings.append(Setting(e.grading, read["engine"] + shared, e.batch))
    return [Measures(**m) for m in read["measures"]]


def results_table(found: Collected, shown: Shown, columns: Sequence[Column]) -> str:
    heads = ["system", *(f"Q{k} {heading}" for k in shown.horizons for heading, *_ in columns)]
    rows = []
    for system in shown.systems:
        if any((system, k) in found.results for k in shown.horizons):
            results = [(found.results.get((system, k)), c) for k in shown.horizons for c in columns]
            cells = ("–" if r is None else cell(r.metrics[c[1]], c[2], c[3]) for r, c in results)
            rows.append([label(system), *cells])
    return markdown_table(heads, rows)


def results_caption(found: Collected, work: Work) -> str:
    results = list(found.results.values())
    tasks = ", ".join(f"{n} tasks of Q{k}" for k, n in sorted({(r.k, r.tasks) for r in results}))
    seeds = sorted({r.seeds for r in results if r.seeds > 1})
    spread = f"± standard deviation over {' or '.join(map(str, seeds))} seeds; " if seeds else ""
    engines = sorted({f"{r.setting.engine}, {r.setting.batch_size} trajectories at once" for r in results})
    return (
        f"The {work.split} split: {tasks}; {sampled(asdict(work.suite.evaluation))}. EM and F1 are sums over the "
        f"questions, grading {results[0].setting.grading}. "
        f"Peak counts prompt and completion in the model's own tokens. {spread}"
        f"± standard error over tasks where a system has one run. Time is wall time of a trajectory: "
        f"{'; '.join(engines)}."
    )


def sampled(evaluation: dict[str, Any]) -> str:
    return f"episodes per task and seed: {evaluation['samples']}, sampled at temperature {evaluation['temperature']:g}"
