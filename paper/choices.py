"""Chooses settings on dev by the plan's rule: one after the other, each with the values that were chosen before it.

    python -m paper choices --of real

Trains the arms of a choice, evaluates them on the dev split, and takes the smallest value that is within one standard
error of the best. The values are shown, not entered: that is done by hand, in training.toml and in the plan, before
anything is run on the test split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table, pyplot, save
from memopd.config import load_config
from memopd.evaluate import Estimate
from memopd.evaluate.tables import F1
from paper.control import Curves, curves_of, draw_curve
from paper.jobs import Made
from paper.page import Findings, provenance, write_page
from paper.settings import Choice, Choices
from paper.suite import Work, make
from paper.trained import PER_DATA, Collected, cell_of, collect, label, settings_of

RULE = (
    "**Bold**: the choice. It is the smallest value whose F1 is at most one standard error (of the best value's mean, "
    "over tasks) below the best."
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One choice. `value` is None while results are missing."""

    choice: Choice
    work: Work
    found: Collected
    value: float | None


def smallest_within_error(scores: Mapping[float, Estimate]) -> float:
    """The plan's rule. The standard error is that of the best value's mean."""
    best = max(scores.values(), key=lambda score: score.mean)
    return min(value for value, score in scores.items() if score.mean >= best.mean - (best.spread or 0))


def choose(settings: Choices, work: Work, until: float | None, only_collect: bool) -> Iterator[tuple[Chosen, Made]]:
    """Make every choice in turn, until one lacks results."""
    entered: tuple[tuple[str, str], ...] = ()
    for choice in settings.choices:
        systems = (*choice.arms, *settings.beside)
        own = replace(work, wanted=tuple((s, settings.horizon) for s in systems), overrides=(*work.overrides, *entered))
        made = Made() if only_collect else make(own, until=until)
        found = collect(own, systems, (settings.horizon,))
        scores = scores_of(choice, own, found, settings.horizon)
        value = smallest_within_error(scores) if len(scores) == len(choice.arms) else None
        yield Chosen(choice, own, found, value), made
        if value is None:
            return
        entered = (*entered, (choice.setting, repr(value)))


def scores_of(choice: Choice, work: Work, found: Collected, k: int) -> dict[float, Estimate]:
    results = {value_of(choice, work, arm): found.results.get((arm, k)) for arm in choice.arms}
    return {value: f1 for value, result in results.items() if result and (f1 := result.metrics["f1"])}


def value_of(choice: Choice, work: Work, arm: str) -> float:
    return float(work.suite.arms[arm][choice.setting])


def show(settings: Choices, made: list[Chosen], failed: dict[str, str], output: Path) -> list[Path]:
    """Write OUTPUT/choices.json, .md and .png from the results that exist."""
    if not any(one.found.results for one in made):
        raise ValueError(f"{made[0].work.folder}: there is no result yet; run the experiment without --collect")
    k = settings.horizon
    curves = [curves_of(one.work) for one in made]
    numbers: dict[str, Any] = {
        "choices": [
            {
                "setting": one.choice.setting,
                "value": one.value,
                "with": dict(one.work.overrides),
                "results": [result.as_dict() for result in one.found.results.values()],
                "data": {of: [r.as_dict() for r in part.results.values()] for of, part in one.found.data.items()},
                "curves": of_one,
            }
            for one, of_one in zip(made, curves, strict=True)
        ],
        "missing": [
            *dict.fromkeys(what for one in made for what in one.found.missing),
            *(f"{job} failed: {why}" for job, why in failed.items()),
        ],
    }
    body = [part for one in made for part in (f"## {one.choice.setting}", _sentence(one), _table(one, settings))]
    how = provenance([m for one in made for m in one.found.machines], settings_of(made[0].work))
    how |= {"inputs": made[0].found.inputs}
    return write_page(
        "choices", settings, how, Findings(numbers, [*body, RULE], lambda to: _draw(made, curves, k, to)), output
    )


def _sentence(one: Chosen) -> str:
    entered = load_config(one.work.suite.training)
    section, _, name = one.choice.setting.partition(".")
    there = getattr(getattr(entered, section), name)
    given = ", ".join(f"{setting} = {value}" for setting, value in one.work.overrides)
    return (
        (f"With {given}. " if given else "")
        + (f"Chosen: **{one.value:g}**." if one.value is not None else "Not chosen yet, because results are missing.")
        + ("" if one.value in (None, there) else f" training.toml has {there:g}: enter the choice.")
    )


def _table(one: Chosen, settings: Choices) -> str:
    k, rows = settings.horizon, []
    for system in (*one.choice.arms, *settings.beside):
        is_arm = system in one.choice.arms
        value = value_of(one.choice, one.work, system) if is_arm else None
        name = f"{value:g}" if is_arm else label(system)
        result = one.found.results.get((system, k))
        of_data = [part.results.get((system, k)) for part in one.found.data.values()]
        f1 = [cell_of(r, F1) for r in of_data]
        cells = [cell_of(result, column) for column in PER_DATA]
        rows.append([f"**{name}**" if is_arm and value == one.value else name, *cells, *f1])
    heads = [one.choice.setting, *(heading for heading, *_ in PER_DATA), *(f"F1 {of}" for of in one.found.data)]
    return markdown_table(heads, rows)


def _draw(made: list[Chosen], curves: list[Curves], k: int, output: Path) -> None:
    """F1 on dev tasks while training, a panel for each choice."""
    figure, axes = pyplot().subplots(1, len(made), figsize=(4.5 * len(made), 3.8), layout="constrained", squeeze=False)
    for axis, one, of_one in zip(axes[0], made, curves, strict=True):
        for arm, seeds in of_one.items():
            draw_curve(axis, arm, [seed["dev_f1"] for seed in seeds.values() if seed["dev_f1"]])
        axis.set_title(f"{one.choice.setting}: F1 on dev tasks of {k}")
        axis.set_xlabel("update")
        if axis.lines:
            axis.legend(fontsize=8)
    save(figure, output)
