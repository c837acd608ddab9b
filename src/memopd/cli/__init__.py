"""The `memopd` command: one verb per stage. torch is imported inside the verbs that need it, never for --help."""

from __future__ import annotations

from typing import Annotated

import typer

from memopd.cli import audit, config, policy, report, retrieval, rollout, tasks, train, world
from memopd.cli.gateway import gateway
from memopd.cli.options import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(world.app)
app.add_typer(tasks.app, name="tasks")
app.add_typer(retrieval.index, name="index")
app.add_typer(retrieval.serve, name="serve")
policy.register(retrieval.serve)
app.add_typer(rollout.app)
app.command()(gateway)
app.add_typer(audit.app)
app.add_typer(config.app)
app.add_typer(train.app)
app.add_typer(report.app)


def say_version(asked: bool) -> None:
    if asked:
        from memopd import __version__

        print(f"memopd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Say which, and end.")
    ] = False,
) -> None:
    """Train agents that rewrite their own context, in the states they were really in."""


def main() -> None:
    run(app)
