"""`memopd tasks`: group questions into tasks of k, and print what a file of tasks contains."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import out

app = typer.Typer(help="Build files of tasks from questions, or show one.", no_args_is_help=True)

SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip malformed rows, and report how many.")]


@app.command()
def build(
    questions: Annotated[list[str], typer.Argument(help="FlashRAG .jsonl(.gz), Parquet, or hub:org/dataset:split.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The Parquet file to write.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Questions per task.")] = 2,
    source: Annotated[
        list[str] | None, typer.Option(help="The name of a data set; give it once for each file, in order.")
    ] = None,
    skip_bad: SkipBad = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many tasks of each data set.")] = None,
    kind: Annotated[str | None, typer.Option(help="Use only questions of this kind, as `show` names them.")] = None,
) -> None:
    """Group the questions of each data set into tasks of k, with MEM1's prompt, in the schema of Search-R1 and verl."""
    if source and len(source) != len(questions):
        raise ValueError(
            f"--source was given {len(source)} times for {len(questions)} files; give one for each, or none"
        )
    from memopd.agent.protocol import user_message
    from memopd.tasks import Question, Task
    from memopd.tasks.files import group, read_tasks, write_tasks

    tasks: list[Task] = []
    left_over = 0
    for i, path in enumerate(questions):
        data_sets: dict[str, list[Question]] = {}  # a file may contain several; a task never mixes them
        for read in read_tasks(path, skip_bad):
            data_sets.setdefault(source[i] if source else read.source, []).extend(
                q for q in read.questions if kind in (None, q.kind)
            )
        for name, asked in data_sets.items():
            tasks += group(asked, k, name)[:limit]
            left_over += len(asked) % k
    if not tasks:
        of_kind = f" of kind {kind!r}" if kind else ""
        raise ValueError(f"{', '.join(questions)}: no task could be made: no data set has {k} questions{of_kind}")
    write_tasks(output, tasks, user_message)
    counts = ", ".join(f"{count} of {name}" for name, count in Counter(task.source for task in tasks).items())
    print(f"{output}: {len(tasks)} tasks of {k} questions ({counts}); {left_over} questions left over")


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
