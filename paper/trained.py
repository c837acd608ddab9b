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
from memopd.evaluate.tables import COSTS, DEPENDENCY, EM, F1, PEAK, TIME, Column
from memopd.evaluate.tables import shown as cell
from paper.comparisons import (
    COMPARED,
    compared,
    comparison_caption,
    comparison_table,
    grows,
    growth,
    growth_table,
    mean_of,
    orders,
    orders_tables,
    shorter,
)
from paper.evaluation import Part, changed_inputs, measured_with
from paper.page import Findings, provenance, recorded, rewrite, write_page
from paper.settings import FIXED, Shown
from paper.suite import Work

LABELS = {
    "ppo": "PPO",
    "persistent": "persistent OPD",
    "memopd": "MemOPD",
    "memopd-0.02": "MemOPD, λ 0.02",
    "teacher-only": "teacher without reward",
    "grpo": "GRPO",
    "memopd-grpo": "MemOPD with GRPO",
    "student-mem1": "SFT",
}
COLUMNS: tuple[Column, ...] = (EM, F1, PEAK)  # the paper's, but for time
VALID = COSTS[0]
PER_DATA: tuple[Column, ...] = (EM, F1, VALID, PEAK, DEPENDENCY)
SHORT = ("f1", "peak")  # what is compared for each data set and convention; the JSON has all
LISTED = ("Against each other", "Does the advantage grow with the horizon?")


@dataclass(slots=True)
class Collected:
    """The results by system and horizon."""

    runs: dict[tuple[str, int], dict[int, list[Measures]]] = field(default_factory=dict)  # seed -> tasks
    results: dict[tuple[str, int], Result] = field(default_factory=dict)
    machines: list[dict[str, str]] = field(default_factory=list)
    inputs: dict[str, list[dict[str, str | None]]] = field(default_factory=dict)  # of all evaluations, each once
    missing: list[str] = field(default_factory=list)
    data: dict[str, Collected] = field(default_factory=dict)  # the same of each data set, if there are several

    def seed_means(self, system: str, k: int) -> dict[int, dict[str, float]]:
        runs = self.runs.get((system, k), {})
        return {seed: {metric: mean_of(m, metric) for metric in COMPARED} for seed, m in runs.items()}


def show(name: str, shown: Shown, work: Work, failed: dict[str, str], output: Path) -> list[Path]:
    """Write OUTPUT/NAME.json, .md and .png from the results that exist."""
    found = collect(work, shown.systems, shown.horizons)
    if not found.results:
        raise ValueError(f"{work.folder}: there is no result yet; the first missing one is {found.missing[0]}")
    own: Findings = import_module(f"paper.{name}").findings(found, shown, work)
    others = {c: collect(work.under(c), shown.systems, shown.horizons) for c in work.suite.conventions}
    numbers = numbers_of(found, shown, work) | own.numbers
    if others:
        numbers["conventions"] = {c: numbers_of(of, shown, work.under(c)) for c, of in others.items()}
    late = [f"{what}, sampled as in {c}" for c, of in others.items() for what in of.missing]
    numbers["missing"] = [*found.missing, *late, *(f"{job} failed: {why}" for job, why in failed.items())]
    settings = settings_of(work)
    body = body_of(own.body, found, numbers, others, shown, settings)
    made = provenance(found.machines, settings) | {"inputs": found.inputs}
    return write_page(name, shown, made, Findings(numbers, body, own.draw), output)


def numbers_of(found: Collected, shown: Shown, work: Work) -> dict[str, Any]:
    """Results and comparisons, together and for each data set."""
    comparisons = [
        line | {"a": label(a), "b": label(b)}
        for a, b in shown.compare
        for k in shown.horizons
        for line in compared(
            (a, found.runs.get((a, k), {})), (b, found.runs.get((b, k), {})), k, b in work.suite.arms
        )
    ]  # fmt: skip
    numbers: dict[str, Any] = {
        "results": [r.as_dict() for r in found.results.values()],
        "seeds": {f"{label(s)}, Q{k}": found.seed_means(s, k) for s in shown.systems for k in shown.horizons},
        "comparisons": comparisons,
    }
    if len(shown.horizons) > 1:
        numbers["growth"] = growth(comparisons)
    if found.data:
        numbers["data"] = {data: numbers_of(part, shown, work) for data, part in found.data.items()}
    if shown.claims or shown.grows or shown.shorter:
        numbers["orders"] = verdicts(numbers, shown)
    return numbers


def verdicts(numbers: dict[str, Any], shown: Shown) -> list[dict[str, Any]]:
    """The claims of the plan, over all tasks and for each data set. Those that fail come first."""
    claimed, growing, short = (
        [(label(a), label(b)) for a, b in pairs] for pairs in (shown.claims, shown.grows, shown.shorter)
    )
    lines, grown = list(numbers["comparisons"]), list(numbers.get("growth", []))
    for data, part in numbers.get("data", {}).items():
        lines += [line | {"data": data} for line in part["comparisons"]]
        grown += [line | {"data": data} for line in part.get("growth", [])]
    made = orders(lines, claimed) + grows(grown, growing, shown.horizons) + shorter(lines, short, max(shown.horizons))
    return sorted(made, key=lambda order: order["holds"])


def body_of(
    own: list[str], found: Collected, numbers: dict[str, Any], others: dict[str, Collected], shown: Shown,
    settings: dict[str, Any],
) -> list[str]:  # fmt: skip
    """A page: claims that fail, claims that hold, the experiment's own tables, each data set, other conventions."""
    body = [*orders_tables(numbers["orders"]), "## Results", *own] if "orders" in numbers else list(own)
    if lines := numbers["comparisons"]:
        body += [f"## {LISTED[0]}", comparison_table(lines), comparison_caption(lines)]
    if lines := numbers.get("growth"):
        body += [f"## {LISTED[1]}", growth_table(lines)]
    for data, part in found.data.items():
        body += [f"## {data}", results_table(part, shown, PER_DATA)]
        if lines := [c for c in numbers["data"][data]["comparisons"] if c["metric"] in SHORT]:
            body += [comparison_table(lines)]
    for convention, of in others.items():
        how, part = settings["conventions"][convention], numbers["conventions"][convention]
        seeds = ", ".join(map(str, how["seeds"]))
        body += [f"## At temperature {how['temperature']:g} and top-p {how['top_p']:g}, seed {seeds}"]
        body += [results_table(of, shown, PER_DATA)] if of.results else ["There is no result yet."]
        if lines := [c for c in part["comparisons"] if c["metric"] in SHORT]:
            body += [comparison_table(lines)]
    return body


def rewritten(name: str, shown: Shown, output: Path) -> list[Path]:
    """Write the page of an experiment again from its JSON, where the runs themselves are no longer there."""
    made = recorded(name, output)
    found = read_back(made, shown)
    others = {c: read_back(numbers, shown) for c, numbers in made.get("conventions", {}).items()}
    own: list[str] = import_module(f"paper.{name}").body(found, shown, made["settings"])
    return rewrite(name, shown, made, body_of(own, found, made, others, shown, made["settings"]), output)


def read_back(made: dict[str, Any], shown: Shown) -> Collected:
    """Results as `numbers_of` wrote them."""
    systems = {label(system): system for system in shown.systems}
    found = Collected(missing=made.get("missing", []))
    for line in made["results"]:
        values = line["metrics"].items()
        metrics: Any = {metric: estimate and Estimate(**estimate) for metric, estimate in values}
        result = Result(line["system"], line["k"], Setting(**line["setting"]), line["tasks"], line["seeds"], metrics)
        found.results[systems[line["system"]], line["k"]] = result
    found.data = {data: read_back(part, shown) for data, part in made.get("data", {}).items()}
    return found


def settings_of(work: Work) -> dict[str, Any]:
    """All settings: of the suite, and of the training that its arms have in common."""
    trained: dict[str, Any] = json.loads(load_config(work.suite.training, dict(work.overrides)).as_json())
    return {"split": work.split, "overrides": dict(work.overrides), **asdict(work.suite), "trained_with": trained}


def label(system: str) -> str:
    """The name of a system in tables: `teacher-mem1` is `teacher, mem1`."""
    who, _, rule = system.partition("-")
    rule = rule.partition(":")[0] if "/" in rule else rule  # amem:FOLDER
    return LABELS.get(system) or (f"{ {'student': 'SFT'}.get(who, who) }, {rule}" if who in FIXED else system)


def collect(work: Work, systems: Sequence[str], horizons: Sequence[int]) -> Collected:
    """The results of every data set, and of all tasks together if there are several data sets."""
    found = Collected()
    parts = {data: _collect(work, systems, horizons, data, found) for data in work.data}
    if len(parts) == 1:
        found.runs, found.results = (one := next(iter(parts.values()))).runs, one.results
        return found
    found.data = parts
    for system in systems:
        for k in horizons:
            of_data = [part.runs.get((system, k), {}) for part in parts.values()]
            seeds = sorted(set.intersection(*(set(runs) for runs in of_data)))
            if seeds:
                runs = {seed: [m for each in of_data for m in each[seed]] for seed in seeds}
                setting = next(iter(parts.values())).results[system, k].setting
                found.runs[system, k] = runs
                found.results[system, k] = summarise(label(system), list(runs.values()), setting)
    return found


def _collect(work: Work, systems: Sequence[str], horizons: Sequence[int], data: str, whole: Collected) -> Collected:
    """One data set. What it was measured on, and what is missing, goes into `whole`."""
    found = Collected()
    for system in systems:
        for k in horizons:
            settings: list[Setting] = []
            seeds = work.suite.seeds_of(system)
            runs = {seed: m for seed in seeds if (m := _read(work, system, seed, k, data, whole, settings))}
            if runs:
                found.runs[system, k] = runs
                found.results[system, k] = summarise(label(system), list(runs.values()), settings[0])
    return found


def _read(
    work: Work, system: str, seed: int, k: int, data: str, found: Collected, settings: list[Setting]
) -> list[Measures] | None:
    e, file = work.suite.evaluation, work.result_of(system, seed, k, data)
    seeds = "" if work.suite.seeds_of(system) == (0,) else f"seed {seed}"
    what = ", ".join(filter(None, (label(system), seeds, data, f"Q{k}")))
    if not file.is_file():
        found.missing.append(what)
        return None
    read = json.loads(file.read_text())
    part = Part(system, seed, k, read["settings"]["memory"], work.tasks_of(data, k), str(file))
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
            rows.append([label(system), *(cell_of(r, c) for r, c in results)])
    return markdown_table(heads, rows)


def costs(found: Collected) -> list[str]:
    """A section with one row per system and k, in which our counts and MEM1's stand side by side."""
    results = list(found.results.values())
    columns = [c for c in COSTS if any(r.metrics.get(c[1]) for r in results)]
    lacking = "; ".join(heading for heading, *_ in COSTS if heading not in [c[0] for c in columns])
    rows = [[r.system, str(r.k), *(cell_of(r, c) for c in columns)] for r in results]
    caption = (
        "MEM1 counts peak and dependency without the stable prefix q, and drops trajectories with EM = 0 from its "
    )
    caption += f"peak. Not recorded in these runs: {lacking}." if lacking else "peak."
    table = markdown_table(["system", "k", *(heading for heading, *_ in columns)], rows)
    return ["## Costs with and without q", table, caption]


def cell_of(result: Result | None, column: Column) -> str:
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
    top_p = evaluation.get("top_p", 1)  # older results do not have it
    nucleus = "" if top_p == 1 else f" and top-p {top_p:g}"
    temperature = f"{evaluation['temperature']:g}{nucleus}"
    return f"episodes per task and seed: {evaluation['samples']}, sampled at temperature {temperature}"
