"""What `memopd evaluate` does: episodes of every file of tasks and every seed, measured and put into tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memopd.agent.rollout import codec_of, repeat
from memopd.evaluate import Measures, Result, Setting, compare, comparison_table, measure_all, summarise
from memopd.evaluate.tables import table_1, table_2
from memopd.tasks.files import read_tasks

COMPARED = ("em", "f1", "peak", "dependency")


@dataclass(frozen=True, slots=True)
class Evaluation:
    results: tuple[Result, ...]  # one per file of tasks
    runs: tuple[tuple[tuple[Measures, ...], ...], ...]  # per file, per seed, per task

    def as_dict(self) -> dict[str, Any]:
        per_task = [[[asdict(m) for m in run] for run in runs] for runs in self.runs]
        return {"results": [r.as_dict() for r in self.results], "tasks": per_task}

    def tables(self, against: Path | None) -> Iterator[Any]:
        yield table_1(self.results)
        if single := [r for r in self.results if r.k == 1]:
            yield table_2(single)
        if against is None:
            return
        other = json.loads(against.read_text())
        for mine, line, theirs, their_line in zip(
            self.runs, self.results, other["tasks"], other["results"], strict=True
        ):
            a, b = [m for run in mine for m in run], [Measures(**m) for run in theirs for m in run]
            compared = {metric: compare(a, b, metric) for metric in COMPARED}  # type: ignore[arg-type]
            yield comparison_table(f"{line.system}, Q{line.k}", their_line["system"], compared)


def evaluate(
    files: Sequence[Path],
    run_of: Callable[[list[tuple[str, Any]], int], Any],
    limit: int | None,
    seeds: int,
    grading: Any,
    system: str,
    engine: str,
    batch: int,
    progress: Callable[[Iterator[Any], int], Iterator[Any]],
) -> Evaluation:
    results, everything = [], []
    for file in files:
        tasks = read_tasks(file)[:limit]
        runs = []
        for seed in range(seeds):
            run = run_of(list(repeat(tasks)), seed)
            episodes = progress(run.episodes(), len(tasks))
            runs.append(tuple(measure_all(episodes, tasks, codec_of(run.tokenizer).decode, str(grading))))  # type: ignore[arg-type]
        results.append(summarise(system, runs, Setting(str(grading), engine, batch)))  # type: ignore[arg-type]
        everything.append(tuple(runs))
    return Evaluation(tuple(results), tuple(everything))
