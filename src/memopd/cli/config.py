"""`memopd config`, and the way every command takes a configuration: a TOML file, and any of its fields as an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopd.cli.options import Convention

if TYPE_CHECKING:
    from memopd.config import RunConfig

app = typer.Typer()

CONFIG_HELP = "A TOML file. You can override any field with --section.field VALUE."
ANY_FIELD = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=ANY_FIELD)
def config(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="CONFIG", help=CONFIG_HELP)] = None,
    protocol: Convention = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configurations instead.")] = False,
) -> None:
    """Check a configuration and print it as JSON, with all defaults; or print the JSON schema, for editors."""
    from memopd.config import json_schema, load_config

    if schema == (file is not None):
        raise ValueError("give a CONFIG to check and print, or --schema alone")
    if file is None:
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        settings = load_config(file, overrides(context.args, {}, protocol))
        check(settings)
        print(settings.as_json(), end="")


def check(settings: RunConfig) -> None:
    """The checks of `memopd train` and `memopd sft` that need no model, no store and no index."""
    from memopd.agent.parts import check_parts
    from memopd.attention import check_attention
    from memopd.train.learner import check_objective
    from memopd.train.sft import check_keep

    check_objective(settings)
    check_attention(settings.model.attention)
    check_parts(settings.tasks, needs_index=False)  # sft has none
    check_keep(settings.sft.keep)


def overrides(
    arguments: list[str], short: dict[str, str | None] | None = None, protocol: str | None = None
) -> dict[str, str]:
    """Read `--optimise.lr 1e-5` or `--optimise.lr=1e-5`; `short` holds the fields that have their own option.

    The settings of `--protocol` replace those of the file, and options replace both.
    """
    from memopd.config import PROTOCOLS

    found = {f"tasks.{name}": str(value) for name, value in PROTOCOLS[protocol].items()} if protocol else {}
    found |= {name: value for name, value in (short or {}).items() if value is not None}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ValueError(f"{argument!r}: no such option; give settings as --section.field value")
        if not equals:
            try:
                value = next(rest)
            except StopIteration:
                raise ValueError(f"{argument}: needs a value") from None
        found[name] = value
    return found
