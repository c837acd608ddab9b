"""`memopd demonstrate`: write episodes to imitate, from questions with gold passages or with answers alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopd.cli.options import Json, check_new, numbers, out, track
from memopd.cli.tasks import Part, Questions, SkipBad, Sources, Split, ids_of

if TYPE_CHECKING:
    from memopd.agent.demonstrator import Made
    from memopd.tasks import Question


def demonstrate(
    questions: Questions,
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store: a .parquet file, or a folder.")],
    index: Annotated[str, typer.Option(help="The folder of an index that has the gold passages.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer of the model that will learn: a folder or a hub name.")],
    k: Annotated[str, typer.Option("-k", help="Questions per task: a number, or several such as 1,2,4.")] = "1,2",
    source: Sources = None,
    split: Split = None,
    part: Part = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many questions of each data set.")] = None,
    seed: Annotated[int, typer.Option(help="The seed with which questions are shuffled before they are grouped.")] = 0,
    topk: Annotated[int, typer.Option(help="Documents per search.", min=1)] = 3,
    memory: Annotated[str, typer.Option(help="The memory rule: mem1, full_response, ..., or module:Class.")] = "mem1",
    max_context: Annotated[int, typer.Option(help="The most tokens per prompt.", min=1)] = 4096,
    yes_no: Annotated[
        bool, typer.Option("--yes-no", help="Keep questions with these answers, too, which no passage states.")
    ] = False,
    skip_bad: SkipBad = False,
    as_json: Json = False,
) -> None:
    """Write correct episodes for `memopd sft`, made by searching the index for each question. No model is needed."""
    horizons = sorted(set(numbers(k)))
    if horizons[0] < 1:
        raise ValueError(f"-k must be 1 or more, got {k}")
    check_new(output)
    from memopd.agent import demonstrator
    from memopd.agent.parts import check_parts
    from memopd.config import TasksConfig
    from memopd.models.load import load_tokenizer
    from memopd.record import write_episodes
    from memopd.retrieval import open_index

    tasks = TasksConfig(index=index, memory=memory, topk=topk, max_context=max_context)
    check_parts(tasks, flag="--")
    sets = _by_name(questions, source, split, part, limit, skip_bad)
    made: dict[str, Made] = {}
    episodes = demonstrator.demonstrate(
        sets, horizons, open_index(index), load_tokenizer(tokenizer), made, tasks, seed, yes_no, track
    )
    first = next(episodes, None)
    if first is None:
        raise ValueError(_nothing(index, k, made))
    write_episodes(output, chain([first], episodes))
    if as_json:
        print(json.dumps({name: of_set.as_dict() for name, of_set in made.items()}))
    else:
        _show(output, made, horizons)


def _by_name(
    paths: list[str], source: list[str] | None, split: Path | None, part: str | None, limit: int | None, skip_bad: bool
) -> dict[str, list[Question]]:
    """The questions of each data set, which may be in several files."""
    from memopd.tasks.files import read_sets

    sets: dict[str, list[Question]] = {}
    for name, asked in read_sets(paths, source, skip_bad, ids_of(split, part)):
        sets.setdefault(name, []).extend(asked)
    for name, asked in sets.items():
        ids = Counter(q.id for q in asked)
        if len(ids) < len(asked):
            raise ValueError(f"{name}: question {ids.most_common(1)[0][0]!r} occurs twice; give its file once")
    sets = {name: asked[:limit] for name, asked in sets.items() if asked}
    if not sets:
        of_part = f" in part {part!r} of {split}" if split else ""
        raise ValueError(f"{', '.join(paths)}: no questions{of_part}")
    return sets


def _nothing(index: str, k: str, made: Mapping[str, Made]) -> str:
    """Why there is no episode at all."""
    if solved := sum(of_set.solved for of_set in made.values()):
        return (
            f"-k {k}: {solved} questions were solved alone, but no task of so many: it needs k solved questions of one "
            "data set, and what is noted of them must fit into --max-context"
        )
    reasons = _reasons(sum((of_set.failures for of_set in made.values()), Counter()))
    return f"{index}: none of the questions could be solved with this index ({reasons}); does it have their passages?"


def _reasons(failures: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in failures.most_common())


def _show(output: Path, made: dict[str, Made], horizons: list[int]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{output}: correct of played", title_justify="left")
    headings = ("data set", "questions", "solved", *(f"k = {k}" for k in horizons), "calls", "tokens")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "data set" else "right")
    for name, m in made.items():
        kept = (f"{m.episodes[k]:,} of {m.tasks[k]:,}" for k in horizons)
        table.add_row(escape(name), f"{m.questions:,}", f"{m.solved:,}", *kept, f"{m.calls:,}", f"{m.tokens:,}")
    out.print(table)
    for name, m in made.items():
        reasons = _reasons(m.failures)
        alone = m.questions - m.with_gold
        by_answers = f"; {alone:,} without gold passages in the index, by answers alone" if alone else ""
        if reasons or by_answers:
            out.print(f"{name}: {reasons or 'all solved'}{by_answers}", markup=False, highlight=False, soft_wrap=True)
