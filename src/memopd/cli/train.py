"""`memopd sft` and `memopd train`: they take a TOML file, and any of its fields on the command line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopd.cli.config import ANY_FIELD, CONFIG_HELP, overrides
from memopd.cli.options import Convention

if TYPE_CHECKING:
    from memopd.config import RunConfig

app = typer.Typer()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The run directory to write; it must be new unless you pass --resume.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --output.")]


@app.command(context_settings=ANY_FIELD)
def sft(
    context: typer.Context,
    config: Config,
    output: Output,
    resume: Resume = False,
    protocol: Convention = None,
    keep: Annotated[str | None, typer.Option(help="Which interactions to imitate, for example correct,valid.")] = None,
) -> None:
    """Train on recorded interactions by supervised learning, with every response in its exact state."""
    from memopd.config import load_config

    settings = load_config(config, overrides(context.args, {"sft.keep": keep}, protocol))
    with explain_exhaustion(output):
        from memopd.train.sft import sft as run

        run(settings, output, resume)
    print_path(output, bool(settings.lora.rank))


@app.command(context_settings=ANY_FIELD)
def train(
    context: typer.Context,
    config: Config,
    output: Output,
    resume: Resume = False,
    protocol: Convention = None,
    teacher_state: Annotated[
        str | None, typer.Option(help="aligned (MemOPD), persistent (the paper's control), or none (no teacher).")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(help="A store of recorded episodes to train on instead of sampling.")
    ] = None,
) -> None:
    """Train with reinforcement learning and on-policy distillation in exact states."""
    from memopd.config import load_config

    short = {"teacher.state": teacher_state, "sampling.replay": replay}
    settings = load_config(config, overrides(context.args, short, protocol))
    check_replay(settings)
    with explain_exhaustion(output):
        from memopd.train.train import train as run

        run(settings, output, resume)
    print_path(output, bool(settings.lora.rank))


def check_replay(settings: RunConfig) -> None:
    """Refuse a store that was sampled from another distribution before any model is loaded.

    Its first episode is enough, because a store does not mix settings; training checks every episode.
    """
    if not settings.sampling.replay:
        return
    from memopd.record import read_episodes
    from memopd.train.batch import usable

    first = next(iter(read_episodes(settings.sampling.replay)), None)
    if first is not None:
        usable([first], settings.optimise.budget, settings.sampling.temperature)


def print_path(output: Path, has_adapter: bool) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        print(output / ("adapter" if has_adapter else "model"))


@contextmanager
def explain_exhaustion(output: Path) -> Iterator[None]:
    """Replace errors about full memory or a full disk, which a user can fix, by one line that says how."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError, on a CPU without a subclass
        message = str(error).splitlines()[0] if str(error) else "out of memory"
        if not isinstance(error, MemoryError) and not any(sign in message for sign in NO_MEMORY):
            raise
        raise ValueError(
            f"{message}: lower optimise.budget, set model.checkpointing = true, or use more ranks; the last checkpoint "
            "is intact"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"{output}: {os.strerror(error.errno)}: free some space and continue with --resume; the last checkpoint "
            "is intact"
        ) from error


NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
