"""Shared by all commands: options, consoles, progress bars and model loading. torch is imported only when needed."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(width=None if sys.stdout.isatty() else 140)  # wide enough for tables in files and pipes
err = Console(stderr=True)

Attention = Annotated[str, typer.Option(help="auto, dense, flex, cascade, or module:Class for your own kernel.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def run(app: typer.Typer) -> None:
    """Run a command line: logs go to stderr, and a user's mistake becomes one line instead of a traceback."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs a line for every request
    try:
        app()
    except (ValueError, OSError) as error:  # a user's mistake; any other error is a bug and keeps its traceback
        if os.environ.get("MEMOPD_DEBUG"):
            raise
        err.print(f"memopd: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


def track(description: str, items: Iterable[Any]) -> Iterable[Any]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    from rich.progress import track as bar

    return bar(items, description=f"{description:<24}", console=err, disable=not err.is_terminal, transient=True)


def plain(value: Any) -> Any:
    """Replace values that JSON cannot represent: NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(path: str, dtype: Precision) -> Any:
    """Load a causal LM from a folder or the hub: safetensors only, no remote code."""
    import torch

    from memopd.models.load import load_causal_lm

    return load_causal_lm(os.path.expanduser(path), getattr(torch, dtype)).to(device()).eval()


def numbers(text: str, separator: str = ",") -> list[int]:
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise ValueError(f"expected whole numbers separated by {separator!r}, got {text!r}") from None
