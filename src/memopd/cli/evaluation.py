"""`memopd evaluate`: play every task file with every seed, measure the episodes, and make the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memopd.agent import Outcome, repeat
from memopd.evaluate import Measures, Result, Setting, compare, comparison_table, measure_outcomes, summarise
from memopd.evaluate.provenance import warn_changed
from memopd.evaluate.tables import costs_table, table_1, table_2
from memopd.files import read_object
from memopd.tasks.files import read_tasks
from memopd.types import Episode

COMPARED = ("em", "f1", "peak", "dependency")


@dataclass(frozen=True, slots=True)
class Evaluation:
    results: tuple[Result, ...]  # one per task file
    runs: tuple[tuple[tuple[Measures, ...], ...], ...]  # per file, per seed, per task
    made: dict[str, Any] = field(default_factory=dict)  # the provenance

    def as_dict(self) -> dict[str, Any]:
        per_task = [[[asdict(m) for m in run] for run in runs] for runs in self.runs]
        return {"provenance": self.made, "results": [r.as_dict() for r in self.results], "tasks": per_task}

    def tables(self, against: Sequence[Other] | None) -> Iterator[Any]:
        yield table_1(self.results)
        if single := [r for r in self.results if r.k == 1]:
            yield table_2(single)
        yield costs_table(self.results)
        if against is None:
            return
        for mine, line, (system, b) in zip(self.runs, self.results, against, strict=True):
            a = [m for run in mine for m in run]
            compared = {metric: compare(a, b, metric) for metric in COMPARED}  # type: ignore[arg-type]
            yield comparison_table(f"{line.system}, Q{line.k}", system, compared)


Other = tuple[str, list[Measures]]  # another system, and its measures of one of the task files


def read_other(file: Path, files: Sequence[Path], limit: int | None) -> list[Other]:
    """What `as_dict` described, of the same tasks. Read before anything is sampled, which may take hours."""
    other = read_object(file)
    warn_changed(file, other.get("provenance", {}))
    try:
        pairs = zip(other["results"], other["tasks"], strict=True)
        found = [(line["system"], [Measures(**m) for run in runs for m in run]) for line, runs in pairs]
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: not written by `memopd evaluate -o` ({type(error).__name__}: {error})") from None
    if len(found) != len(files):
        raise ValueError(f"{file}: has results of {len(found)} task files, and {len(files)} are given: give the same")
    for (_, measures), tasks in zip(found, files, strict=True):
        only = {m.task for m in measures} ^ {task.id for task in read_tasks(tasks)[:limit]}
        if only:
            raise ValueError(
                f"{file}: has results of other tasks than {tasks}, for example {min(only)!r}: give the same tasks and "
                "the same --limit"
            )
    return found


def evaluate(
    files: Sequence[Path],
    sample: Callable[[list[tuple[str, Any]], int], Iterable[tuple[Episode, Outcome]]],
    limit: int | None,
    seeds: int,
    system: str,
    setting: Setting,
    made: dict[str, Any],
) -> Evaluation:
    """Evaluate every file with seeds 0, 1, ...; `sample` plays the tasks of one file with one seed."""
    results, all_runs = [], []
    for file in files:
        tasks = read_tasks(file)[:limit]
        pairs = list(repeat(tasks))
        runs = [tuple(measure_outcomes(sample(pairs, seed), tasks)) for seed in range(seeds)]
        results.append(summarise(system, runs, setting))
        all_runs.append(tuple(runs))
    return Evaluation(tuple(results), tuple(all_runs), made)
