"""main, single and control: what the suite's results say, as tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memopd.evaluate.summary import Result
from memopd.evaluate.tables import shown as cell
from paper import plots
from paper.collect import Collected, collect, compared, curves, label, seed_means
from paper.page import markdown_table, paper_dict, provenance, write_json, write_markdown
from paper.settings import Shown
from paper.suite import Work

# heading, metric, unit, digits: the columns and the units of the paper's Tables 1 and 2
COLUMNS = (("EM ↑", "em", 1, 3), ("F1 ↑", "f1", 1, 3), ("peak ↓ ×10²", "peak", 1e2, 2), ("time ↓ s", "seconds", 1, 2))
DEPENDENCY = ("dependency ↓ ×10⁵", "dependency", 1e5, 3)


def show(name: str, shown: Shown, work: Work, failed: dict[str, str], output: Path) -> list[Path]:
    """Write OUTPUT/NAME.json, .md and .png from whatever results are there."""
    found = collect(work, shown.systems, shown.horizons)
    if not found.results:
        raise ValueError(f"{work.folder}: there is no result to show yet; the first missing one: {found.missing[0]}")
    comparisons = [line for a, b in shown.compare for k in shown.horizons for line in compared(found, a, b, k)]
    settings = {"split": work.split, "overrides": dict(work.overrides), **asdict(work.suite)}
    made = provenance(found.machines, settings) | {
        "experiment": name,
        "results": [r.as_dict() for r in found.results],
        "seeds": {f"{label(s)}, Q{k}": seed_means(found, s, k) for s in shown.systems for k in shown.horizons},
        "comparisons": comparisons,
        "missing": [*found.missing, *(f"{job} failed: {why}" for job, why in failed.items())],
        **paper_dict(shown.paper, shown.differs),
    }
    if name == "control":
        made["curves"] = curves(work)
    paths = [output / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    write_json(paths[0], made)
    dependency = name == "single"
    body = [results_table(found, shown, dependency), _caption(found.results, work)]
    if max(shown.horizons) > 2:
        body += ["## Answers that count", valid_table(found, shown), VALID]
    if comparisons:
        body += ["## Against each other", comparison_table(comparisons), comparison_caption(comparisons)]
    write_markdown(paths[1], shown.title, made, [f"![]({name}.png)", *body], shown.paper, shown.differs)
    (plots.control if name == "control" else plots.systems)(made, shown, paths[2])
    return paths


def results_table(found: Collected, shown: Shown, dependency: bool = False) -> str:
    columns = (*COLUMNS[:3], DEPENDENCY, COLUMNS[3]) if dependency else COLUMNS
    by_name = {(r.system, r.k): r for r in found.results}
    heads = ["system", *(f"Q{k} {heading}" for k in shown.horizons for heading, *_ in columns)]
    rows = []
    for system in map(label, shown.systems):
        if any((system, k) in by_name for k in shown.horizons):
            results = [(by_name.get((system, k)), c) for k in shown.horizons for c in columns]
            rows.append([system, *("–" if r is None else cell(r.metrics[c[1]], c[2], c[3]) for r, c in results)])  # type: ignore[index]
    return markdown_table(heads, rows)


VALID = (
    "A task whose answer has more or fewer parts than questions scores 0. So every score above is the share of tasks "
    "with a valid answer, times the score of those."
)


def valid_table(found: Collected, shown: Shown) -> str:
    """A score of long tasks in its two factors: a list of the right length, and what is right in it."""
    by_name = {(r.system, r.k): r for r in found.results}
    heads = ["system", *(f"Q{k} {heading}" for k in shown.horizons for heading in ("valid %", "F1 of the valid"))]
    rows = [
        [system, *(factor for k in shown.horizons for factor in _factors(by_name.get((system, k))))]
        for system in map(label, shown.systems)
    ]
    return markdown_table(heads, rows)


def _factors(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "–", "–"
    valid, f1 = (result.metrics[metric].mean for metric in ("valid", "f1"))  # type: ignore[union-attr]
    return f"{100 * valid:.1f}", f"{f1 / valid:.2f}" if valid else "–"


def comparison_table(lines: Sequence[dict[str, Any]]) -> str:
    rows = []
    for c in lines:
        seeds, tasks = c["over_seeds"], c["over_tasks"]
        interval = "–" if seeds["low"] is None else f"{seeds['low']:+.3f} to {seeds['high']:+.3f}"
        student = "–" if seeds["p"] is None else f"{seeds['p']:.4f}"
        relative = "–" if c["relative"] is None else f"{100 * c['relative']:+.1f} %"
        rows.append([
            f"{c['a']} − {c['b']}", f"Q{c['k']} {c['metric'].upper()}", f"{c['difference']:+.3f}", relative,
            f"{seeds['ahead']} of {len(c['seeds'])}", interval, student, f"{seeds['p_signs']:.4f}",
            f"{tasks['low']:+.3f} to {tasks['high']:+.3f}", f"{tasks['p']:.4f}",
        ])  # fmt: skip
    heads = ["systems", "measure", "difference", "relative", "seeds ahead", "95 % over seeds", "p, Student",
             "p, exact signs", "95 % over tasks", "p, bootstrap"]  # fmt: skip
    return markdown_table(heads, rows)


def comparison_caption(lines: Sequence[dict[str, Any]]) -> str:
    seeds = max(len(c["seeds"]) for c in lines)
    return (
        "Seeds are paired: same initialisation, same order of the data, same sampling seeds in evaluation. Over seeds: "
        f"Student's paired test and the exact test of signs, which with {seeds} seeds cannot say less than "
        f"{2 / 2**seeds:.4g}. Against a system that has one run they leave out how that run would scatter. Over tasks: "
        "paired bootstrap, each task's score averaged over the seeds. All tests are two-sided."
    )


def sampled(evaluation: dict[str, Any]) -> str:
    return f"episodes a task and seed: {evaluation['samples']}, sampled at temperature {evaluation['temperature']:g}"


def _caption(results: Sequence[Result], work: Work) -> str:
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
