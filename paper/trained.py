"""Collects the suite's results for main, single and control, lists the missing ones, and makes their tables.

A page is a function of its JSON: `rewritten` makes it again without the runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table
from memopd.config import load_config
from memopd.evaluate import Estimate, Measures, Result, Setting, summarise
from memopd.evaluate.tables import COSTS, EM, F1, PEAK, TIME, Column
from memopd.evaluate.tables import shown as cell
from paper.comparisons import COMPARED, compared, comparison_caption, comparison_table, mean_of
from paper.evaluation import Part, changed_inputs, measured_with
from paper.page import Findings, provenance, recorded, rewrite, write_page
from paper.settings import ARMS, Shown
from paper.suite import Work

LABELS = {"ppo": "PPO", "persistent": "persistent OPD", "memopd": "MemOPD", "student-mem1": "SFT"}
COLUMNS: tuple[Column, ...] = (EM, F1, PEAK)  # the paper's, but for time


@dataclass(slots=True)
class Collected:
    """The results by system and horizon."""

    runs: dict[tuple[str, int], dict[int, list[Measures]]] = field(default_factory=dict)  # seed -> tasks
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    machines: list[dict[str, str]] = field(default_factory=list)
    inputs: dict[str, list[dict[str, str | None]]] = field(default_factory=dict)  # of all evaluations, each once
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
    made = provenance(found.machines, settings_of(work)) | {"inputs": found.inputs}
    return write_page(name, shown, made, Findings(numbers | own.numbers, body, own.draw), output)


def rewritten(name: str, shown: Shown, output: Path) -> list[Path]:
    """Write the page of an experiment again from its JSON, where the runs themselves are no longer there."""
    made = recorded(name, output)
    systems = {label(system): system for system in shown.systems}
    found = Collected(missing=made["missing"])
    for line in made["results"]:
        values = line["metrics"].items()
        metrics: Any = {metric: estimate and Estimate(**estimate) for metric, estimate in values}
        result = Result(line["system"], line["k"], Setting(**line["setting"]), line["tasks"], line["seeds"], metrics)
        found.results[systems[line["system"]], line["k"]] = result
    body: list[str] = import_module(f"paper.{name}").body(found, shown, made["settings"])
    if lines := made["comparisons"]:
        body += ["## Against each other", comparison_table(lines), comparison_caption(lines)]
    return rewrite(name, shown, made, body, output)


def settings_of(work: Work) -> dict[str, Any]:
    """All settings: of the suite, and of the training that its arms have in common."""
    trained: dict[str, Any] = json.loads(load_config(work.suite.training, dict(work.overrides)).as_json())
    return {"split": work.split, "overrides": dict(work.overrides), **asdict(work.suite), "trained_with": trained}


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
    if files := changed_inputs(read):
        found.missing.append(f"{what} (the existing result is of another version of {', '.join(files)})")
        return None
    for name, one in read.get("inputs", {}).items():
        if one not in found.inputs.setdefault(name, []):
            found.inputs[name].append(one)
    if read["machine"] not in found.machines:
        found.machines.append(read["machine"])
    shared = f", {read['processes']} processes on it" if read["processes"] > 1 else ""
    settings.append(Setting(e.grading, read["engine"] + shared, e.batch, read["processes"]))
    return [Measures(**m) for m in read["measures"]]


def results_table(found: Collected, shown: Shown, columns: Sequence[Column]) -> str:
    if all(r.setting.is_alone for r in found.results.values()):
        columns = [*columns, TIME]
    heads = ["system", *(f"Q{k} {heading}" for k in shown.horizons for heading, *_ in columns)]
    rows = []
    for system in shown.systems:
        if any((system, k) in found.results for k in shown.horizons):
            results = [(found.results.get((system, k)), c) for k in shown.horizons for c in columns]
            rows.append([label(system), *(_cell(r, c) for r, c in results)])
    return markdown_table(heads, rows)


def costs(found: Collected) -> list[str]:
    """A section with one row per system and k, in which our counts and MEM1's stand side by side."""
    results = list(found.results.values())
    columns = [c for c in COSTS if any(r.metrics.get(c[1]) for r in results)]
    lacking = "; ".join(heading for heading, *_ in COSTS if heading not in [c[0] for c in columns])
    rows = [[r.system, str(r.k), *(_cell(r, c) for c in columns)] for r in results]
    caption = (
        "MEM1 counts peak and dependency without the stable prefix q, and drops trajectories with EM = 0 from its "
    )
    caption += f"peak. Not recorded in these runs: {lacking}." if lacking else "peak."
    table = markdown_table(["system", "k", *(heading for heading, *_ in columns)], rows)
    return ["## Costs with and without q", table, caption]


def _cell(result: Result | None, column: Column) -> str:
    _, metric, unit, digits = column
    estimate = None if result is None else result.metrics.get(metric)
    return "–" if estimate is None else cell(estimate, unit, digits)


def results_caption(found: Collected, settings: dict[str, Any]) -> str:
    results = list(found.results.values())
    tasks = ", ".join(f"{n} tasks of Q{k}" for k, n in sorted({(r.k, r.tasks) for r in results}))
    seeds = sorted({r.seeds for r in results if r.seeds > 1})
    spread = f"± standard deviation over {' or '.join(map(str, seeds))} seeds; " if seeds else ""
    engines = sorted({r.setting.engine for r in results})
    at_once = max(r.setting.batch_size for r in results)
    time = (
        f"Time is wall time of a trajectory, one at a time: {'; '.join(engines)}."
        if all(r.setting.is_alone for r in results)
        else f"Time is not shown, because trajectories waited for each other: up to {at_once} at once, "
        f"{'; '.join(engines)}; the JSON has it."
    )
    return (
        f"The {settings['split']} split: {tasks}; {sampled(settings['evaluation'])}. {trained_with(settings)} "
        f"EM and F1 are sums over the questions, grading {results[0].setting.grading}. "
        f"Peak counts prompt and completion in the model's own tokens. {spread}"
        f"± standard error over tasks where a system has one run. {time}"
    )


def trained_with(settings: dict[str, Any]) -> str:
    """The settings that a table of learning depends on most, in a sentence."""
    if "trained_with" not in settings:
        return "The settings of the training were not recorded."
    o, t, s = (settings["trained_with"][section] for section in ("optimise", "teacher", "sampling"))
    kind = {"ppo": "GAE with a critic", "grpo": "group advantages, no critic"}.get(o["algorithm"], "its own advantages")
    return (
        f"All arms, also the one called PPO, are trained by {o['algorithm']} ({kind}) with learning rate "
        f"{o['lr']:g}, sampled at temperature {s['temperature']:g}, {o['steps']} updates of {o['tasks']} tasks × "
        f"{o['samples']} episodes; the teacher has λ = {t['weight']:g}."
    )


def sampled(evaluation: dict[str, Any]) -> str:
    return f"episodes per task and seed: {evaluation['samples']}, sampled at temperature {evaluation['temperature']:g}"
