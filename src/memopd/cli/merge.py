"""`memopd merge`: add an adapter to the weights of its base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import Precision, check_adapter


def merge(
    base: Annotated[str, typer.Argument(help="The model that the adapter was trained on: a folder or a hub name.")],
    adapter: Annotated[str, typer.Option(help="The LoRA adapter: a folder in PEFT's format.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the merged model; must not exist.")],
    dtype: Annotated[
        Precision | None, typer.Option(help="The precision of the merged model; by default the base's.")
    ] = None,
) -> None:
    """Add a LoRA adapter to the weights of its base and write the result as an ordinary model."""
    if output.exists():
        raise ValueError(f"{output}: exists already: choose another -o, or remove it")
    folder = check_adapter(adapter, base)
    assert folder is not None
    from memopd.models.adapters import write_merged

    write_merged(output, os.path.expanduser(base), str(folder), dtype and str(dtype))
    print(output)
