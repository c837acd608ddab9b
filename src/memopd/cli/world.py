"""`memopd world`: write the embedded world to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import out, track

app = typer.Typer()


@app.command()
def world(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it must be new or empty.")],
    passages: Annotated[int, typer.Option(help="The number of passages, from 200 to 200,000.")] = 20_000,
    seed: Annotated[int, typer.Option(help="The seed of everything that is drawn.")] = 0,
    distractors: Annotated[
        float | None, typer.Option(help="The share of passages with confusable names, from 0 to 0.5.")
    ] = None,
    hops: Annotated[
        str | None, typer.Option(help="The shares of one-hop, bridge and comparison questions, for example 4,4,2.")
    ] = None,
    wordings: Annotated[
        int | None, typer.Option(help="The number of wordings that are used for each relation.")
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="The most oracle episodes for each horizon and memory rule.")
    ] = 4000,
) -> None:
    """Write an invented encyclopedia with its index, tokenizer and tasks, and an oracle's episodes to imitate."""
    from memopd.world.demonstrations import write_world
    from memopd.world.encyclopedia import Difficulty

    given = {"distractors": distractors, "wordings": wordings}
    settings: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if hops is not None:
        try:
            shares = [float(part) for part in hops.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or sum(shares) <= 0:
            raise ValueError(f"--hops takes three shares such as 4,4,2, got {hops!r}")
        settings["hops"] = tuple(s / sum(shares) for s in shares)
    made = write_world(folder, passages, seed, Difficulty(**settings), episodes, track)  # type: ignore[arg-type]
    asked = ", ".join(f"{len(questions):,} {split}" for split, questions in made.questions.items())
    out.print(f"{folder}: {len(made.passages):,} passages; questions: {asked}", highlight=False)
