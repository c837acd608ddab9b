"""Tables for a terminal and for a document, and pictures. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from memopd.files import whole


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table for a terminal. The first column is on the left, numbers are on the right."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def cell(value: float, form: str = "{:.1f}", unit: float = 1.0) -> str:
    """A number, or a dash if it was not measured (NaN)."""
    return "–" if value != value else form.format(value / unit)


def markdown(made: Table) -> str:
    """A table as Markdown, under its title."""
    rows = zip(*(column.cells for column in made.columns), strict=True)
    return f"{made.title}\n\n{markdown_table([str(column.header) for column in made.columns], list(rows))}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    marks = ["---", *["---:"] * (len(columns) - 1)]
    lines = [columns, marks, *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def pyplot() -> Any:
    """matplotlib's pyplot, which draws only to files and opens no window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, output: Path) -> None:
    with whole(output) as partial:
        figure.savefig(partial, dpi=150, format=output.suffix.lstrip(".") or "png")
    pyplot().close(figure)
