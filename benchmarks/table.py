"""One table, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def markdown(made: Table) -> str:
    """The same table for a document."""
    columns = [[column.header, "---" if i == 0 else "---:", *column.cells] for i, column in enumerate(made.columns)]
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in zip(*columns, strict=True)]
    return f"{made.title}\n\n" + "\n".join(f"| {line} |" for line in lines)


def cell(value: float, form: str = "{:.1f}", unit: float = 1.0) -> str:
    """NaN was not measured."""
    return "–" if value != value else form.format(value / unit)
