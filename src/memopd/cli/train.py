"""`memopd sft` and `memopd train`: a TOML file, and any of its fields on the command line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.config import ANY_FIELD, CONFIG_HELP, overrides

app = typer.Typer()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)]
Output = Annotated[Path, typer.Option(help="The run directory, a new one unless --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of --output.")]


@app.command(context_settings=ANY_FIELD)
def sft(
    context: typer.Context,
    config: Config,
    output: Output,
    resume: Resume = False,
    keep: Annotated[str | None, typer.Option(help="Which interactions to imitate: correct,valid.")] = None,
) -> None:
    """Supervised training on recorded interactions, every response in its exact state."""
    from memopd.config import load_config

    settings = load_config(config, overrides(context.args, {"sft.keep": keep}))
    with one_line_for_what_ran_out(output):
        from memopd.train.sft import sft as run

        run(settings, output, resume)
    say_where(output)


@app.command(context_settings=ANY_FIELD)
def train(
    context: typer.Context,
    config: Config,
    output: Output,
    resume: Resume = False,
    teacher_state: Annotated[
        str | None, typer.Option(help="aligned (MemOPD), persistent (the control), none (PPO).")
    ] = None,
    replay: Annotated[str | None, typer.Option(help="Train on recorded episodes instead of sampling.")] = None,
) -> None:
    """PPO with on-policy distillation in exact states."""
    from memopd.config import load_config

    short = {"teacher.state": teacher_state, "sampling.replay": replay}
    settings = load_config(config, overrides(context.args, short))
    with one_line_for_what_ran_out(output):
        from memopd.train.train import train as run

        run(settings, output, resume)
    say_where(output)


def say_where(output: Path) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        print(output / "model")


@contextmanager
def one_line_for_what_ran_out(output: Path) -> Iterator[None]:
    """Memory and disk are something a user can act on: one line, not a traceback."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own kinds are RuntimeErrors, on a CPU no special one
        said = str(error).splitlines()[0] if str(error) else "out of memory"
        if not isinstance(error, MemoryError) and not any(sign in said for sign in NO_MEMORY):
            raise
        raise ValueError(
            f"{said}: lower optimise.budget, set model.checkpointing = true, or use more ranks; the last checkpoint "
            "is intact"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{output}: {os.strerror(error.errno)}: make room and go on with --resume; the last checkpoint is intact"
        ) from error


NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
