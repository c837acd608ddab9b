"""`memopd tasks`: group questions into tasks of k, and print what a file of tasks contains."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import out

app = typer.Typer(help="Build files of tasks from questions, or show one.", no_args_is_help=True)

Questions = Annotated[
    list[str], typer.Argument(help="Question sets: .json(.gz), .jsonl(.gz), .parquet, or hub:org/dataset:split.")
]
Sources = Annotated[
    list[str] | None, typer.Option(help="The name of a data set; give it once for each file, in order.")
]
Split = Annotated[
    Path | None, typer.Option(help='A JSON file that divides the questions: {"nq": {"sft": [ids], "rl": [ids]}, ...}.')
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


@app.command()
def build(
    questions: Questions,
    output: Annotated[Path, typer.Option("-o", "--output", help="The Parquet file to write.")],
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
    print(f"{output}: {len(tasks)} tasks of {k} questions ({counts}); {left_over} questions left over")


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
