"""`memopd sft` and `memopd train`: a TOML file, and any of its fields on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Config = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="TOML; any field can be given as --section.field value.")
]
Output = Annotated[Path, typer.Option(help="The run directory, a new one unless --resume.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of --output.")]
ANY_FIELD = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=ANY_FIELD)
def sft(context: typer.Context, config: Config, output: Output, resume: Resume = False) -> None:
    """Supervised training on recorded interactions, every response in its exact state."""
    from memopd.config import load_config

    settings = load_config(config, overrides(context.args))
    from memopd.optimise.sft import sft as run

    with one_line_for_memory():
        run(settings, output, resume)
    print(output / "model")


@app.command(context_settings=ANY_FIELD)
def train(
    context: typer.Context,
    config: Config,
    output: Output,
    resume: Resume = False,
    teacher_state: Annotated[
        str | None, typer.Option(help="aligned (MemOPD), persistent (the control), none (PPO).")
    ] = None,
    replay: Annotated[Path | None, typer.Option(help="Train on recorded episodes instead of sampling.")] = None,
) -> None:
    """PPO with on-policy distillation in exact states."""
    from memopd.config import load_config

    given = overrides(context.args)
    if teacher_state is not None:
        given["teacher.state"] = teacher_state
    settings = load_config(config, given)
    from memopd.optimise.train import train as run

    with one_line_for_memory():
        run(settings, output, resume, replay)
    print(output / "model")


def overrides(arguments: list[str]) -> dict[str, str]:
    """`--optimise.lr 1e-5` or `--optimise.lr=1e-5`."""
    found: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ValueError(f"{argument!r}: no such option; settings are given as --section.field value")
        if not equals:
            try:
                value = next(rest)
            except StopIteration:
                raise ValueError(f"{argument}: a value must follow") from None
        found[name] = value
    return found


class one_line_for_memory:
    """Out of memory is something a user can act on: one line, not a traceback."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        import torch

        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise ValueError(
                f"out of memory ({str(error).splitlines()[0] if str(error) else 'host'}): lower optimise.budget, set "
                "model.checkpointing = true, or use more ranks; the last checkpoint is intact"
            ) from error
