"""`memopd report`: one HTML page about one or more runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import Json, track

app = typer.Typer()


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories of memopd train or sft.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The page to write; by default RUN/report.html. Required for several runs."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page with curves, tables, timings, and episodes shown token by token."""
    if output is None and len(runs) > 1:
        raise ValueError("several runs share one page: name it with -o page.html")
    from memopd.report import write_report

    made = write_report(runs, output or runs[0] / "report.html", track)
    if as_json:
        print(json.dumps(made))
    else:
        held = f"{made['runs']} run{'s' * (made['runs'] > 1)}, {made['episodes']} episodes to step through"
        print(f"{made['page']}: {held}, {made['bytes'] / 1e6:.1f} MB")
