"""`memopd tasks`: divide questions into parts, group them into tasks of k, and print what a file of tasks contains."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopd.cli.options import out

if TYPE_CHECKING:
    from memopd.tasks import Question

app = typer.Typer(help="Divide questions, build files of tasks from them, or show one.", no_args_is_help=True)

Questions = Annotated[
    list[str], typer.Argument(help="Question sets: .json(.gz), .jsonl(.gz), .parquet, or hub:org/dataset:split.")
]
Sources = Annotated[
    list[str] | None, typer.Option(help="The name of a data set; give it once for each file, in order.")
]
Split = Annotated[
    Path | None, typer.Option(help="A JSON file that divides the questions, as `memopd tasks split` writes it.")
]
Part = Annotated[str | None, typer.Option(help="Use only the questions of this part of --split.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip malformed rows, and report how many.")]


def ids_of(split: Path | None, part: str | None) -> frozenset[str] | None:
    """The ids of the questions to use, or None for all of them."""
    if (split is None) != (part is None):
        raise ValueError("--split and --part belong together: a file, and the part of it to use")
    if split is None or part is None:
        return None
    from memopd.tasks.files import read_split

    return read_split(split, part)


def check_new(output: Path) -> None:
    if output.exists():
        raise ValueError(f"{output}: already exists, and other files may depend on it; choose another name")


@app.command()
def build(
    questions: Questions,
    output: Annotated[Path, typer.Option("-o", "--output", help="The Parquet file to write; must not exist.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Questions per task.")] = 2,
    source: Sources = None,
    split: Split = None,
    part: Part = None,
    skip_bad: SkipBad = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many tasks of each data set.")] = None,
    kind: Annotated[str | None, typer.Option(help="Use only questions of this kind, as `show` names them.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Shuffle each data set with this seed; by default questions keep their order.")
    ] = None,
) -> None:
    """Group the questions of each data set into tasks of k, with our prompt, in the schema of Search-R1 and verl."""
    check_new(output)
    from memopd.agent.protocol import user_message
    from memopd.tasks import Task
    from memopd.tasks.files import group, read_sets, write_tasks

    tasks: list[Task] = []
    left_over = 0
    for name, asked in read_sets(questions, source, skip_bad, ids_of(split, part)):
        of_kind = [q for q in asked if kind in (None, q.kind)]
        if seed is not None:
            random.Random(f"{seed}/{name}").shuffle(of_kind)
        tasks += group(of_kind, k, name)[:limit]
        left_over += len(of_kind) % k
    if not tasks:
        wanted = (f" of kind {kind!r}" if kind else "") + (f" in part {part!r} of {split}" if split else "")
        raise ValueError(f"{', '.join(questions)}: no task could be made: no data set has {k} questions{wanted}")
    write_tasks(output, tasks, user_message)
    counts = ", ".join(f"{count} of {name}" for name, count in Counter(task.source for task in tasks).items())
    print(f"{output}: {len(tasks)} tasks of {k} questions ({counts}); questions left over: {left_over}")


@app.command()
def split(
    questions: Questions,
    output: Annotated[Path, typer.Option("-o", "--output", help="The JSON file to write; must not exist.")],
    parts: Annotated[str, typer.Option(help="The parts and their shares.")] = "sft=4,rl=2,dev=1,test=1",
    source: Sources = None,
    seed: Annotated[int, typer.Option(help="The seed with which each data set is shuffled.")] = 0,
    skip_bad: SkipBad = False,
) -> None:
    """Divide the questions of each data set into parts that share none, for --split and --part of other commands."""
    check_new(output)
    from memopd.files import whole
    from memopd.tasks.files import divide, read_sets

    shares = _shares(parts)
    sets: dict[str, list[Question]] = {}
    for name, asked in read_sets(questions, source, skip_bad):
        sets.setdefault(name, []).extend(asked)
    ids = Counter(question.id for asked in sets.values() for question in asked)
    if ids and (most := ids.most_common(1)[0])[1] > 1:
        raise ValueError(f"{most[1]} questions have the id {most[0]!r}: give each its own, so that a split can name it")
    divided = {name: divide(asked, shares, seed, name) for name, asked in sets.items()}
    with whole(output) as partial:
        partial.write_text(json.dumps(divided, indent=1) + "\n")
    counts = {part: sum(len(of[part]) for of in divided.values()) for part in shares}
    print(f"{output}: " + ", ".join(f"{count} questions for {part}" for part, count in counts.items()))


def _shares(parts: str) -> dict[str, int]:
    """
    >>> _shares("sft=4,rl=2")
    {'sft': 4, 'rl': 2}
    """
    pairs = [part.partition("=") for part in parts.split(",")]
    if not all(name and share.isdecimal() and int(share) for name, _, share in pairs):
        raise ValueError(
            f"--parts takes names with whole numbers above 0, such as sft=4,rl=2,dev=1,test=1, got {parts!r}"
        )
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ValueError(f"--parts names a part twice: {parts!r}")
    return {name: int(share) for name, _, share in pairs}


@app.command()
def passages(
    questions: Questions,
    output: Annotated[Path, typer.Option("-o", "--output", help="The corpus to write: a .jsonl file.")],
) -> None:
    """Write a corpus of the passages that HotpotQA, 2WikiMultihopQA, MuSiQue and SQuAD bring with their questions."""
    from memopd.retrieval import Passage, write_corpus
    from memopd.tasks.files import read_passages

    found = {id: Passage(id, title, text) for path in questions for id, title, text in read_passages(path)}
    if not found:
        raise ValueError(f"{', '.join(questions)}: no passages come with these questions")
    if output.suffix != ".jsonl" or output.exists():
        raise ValueError(f"{output}: give the name of a new file that ends in .jsonl")
    print(f"{output}: {write_corpus(output, found.values()):,} passages")


@app.command()
def show(
    tasks: Annotated[str, typer.Argument(help="A file that `build` wrote, or anything that it reads.")],
    rows: Annotated[int, typer.Option(min=0, help="How many tasks to print.")] = 3,
    skip_bad: SkipBad = False,
) -> None:
    """Count the tasks by data set, k and kind, and print the first few."""
    from rich.markup import escape
    from rich.table import Table

    from memopd.tasks.files import read_tasks

    read = read_tasks(tasks, skip_bad)
    table = Table(title=f"{len(read)} tasks", title_justify="left")
    for heading in ("data set", "k", "tasks", "questions", "aliases", "kinds"):
        table.add_column(heading, justify="right" if heading in ("k", "tasks", "questions", "aliases") else "left")
    for name, k in sorted({(task.source, task.k) for task in read}):
        of_both = [q for task in read if (task.source, task.k) == (name, k) for q in task.questions]
        kinds = Counter(q.kind for q in of_both if q.kind)
        aliases = sum(len(q.answers) for q in of_both)
        table.add_row(
            escape(name), str(k), str(len(of_both) // k), str(len(of_both)), str(aliases),
            escape(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))),
        )  # fmt: skip
    out.print(table)
    for task in read[:rows]:
        out.print(f"\n{task.id}", markup=False, highlight=False)
        for question in task.questions:
            out.print(f"  {question.text}  ->  {' | '.join(question.answers)}", markup=False, highlight=False)
