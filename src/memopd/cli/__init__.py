"""The `memopd` command, with one subcommand per stage. Only a running subcommand imports torch; --help does not."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from memopd.cli import audit, config, policy, report, retrieval, rollout, tasks, train, world
from memopd.cli.demonstrate import demonstrate
from memopd.cli.gateway import gateway
from memopd.cli.merge import merge
from memopd.cli.options import run

ORDER = (
    *("world", "tasks", "index", "serve", "demonstrate", "sft", "rollout", "evaluate", "train", "report"),
    *("gateway", "import", "audit", "draw", "merge", "config", "models"),
)


class InOrder(TyperGroup):
    """Lists the commands in the order in which you use them: first those of a training, then the others."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(world.app)
app.add_typer(tasks.app, name="tasks")
app.add_typer(retrieval.index, name="index")
app.add_typer(retrieval.serve, name="serve")
policy.register(retrieval.serve)
app.command()(demonstrate)
app.add_typer(rollout.app)
app.command()(gateway)
app.add_typer(audit.app)
app.add_typer(config.app)
app.add_typer(train.app)
app.command()(merge)
app.add_typer(report.app)


def print_version(requested: bool) -> None:
    if requested:
        from memopd import __version__

        print(f"memopd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train LLM agents that rewrite their own context, scoring every call on exactly the tokens that it saw."""


def main() -> None:
    run(app)
