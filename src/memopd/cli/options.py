"""What the verbs share: options, consoles, progress, models from disk. No torch before a verb runs."""

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

out = Console(width=None if sys.stdout.isatty() else 140)  # files and pipes get whole tables
err = Console(stderr=True)

Attention = Annotated[str, typer.Option(help="auto, dense, flex, cascade, or module:Class for a kernel of your own.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def run(app: typer.Typer) -> None:
    """A command line: logs on stderr, and one line for a user's mistake."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
    try:
        app()
    except (ValueError, OSError) as error:  # what a user did; anything else is ours and keeps its traceback
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
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.progress import track as bar

    return bar(items, description=f"{description:<24}", console=err, disable=not err.is_terminal, transient=True)


def plain(value: Any) -> Any:
    """Values that JSON has a word for: what was not measured is null, not NaN."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(path: str, dtype: Precision) -> Any:
    """A causal LM from a folder or the hub: safetensors only, no remote code."""
    import torch

    from memopd.models.load import load_causal_lm

    return load_causal_lm(os.path.expanduser(path), getattr(torch, dtype)).to(device()).eval()


def numbers(text: str, separator: str = ",") -> list[int]:
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise ValueError(f"expected whole numbers separated by {separator!r}, got {text!r}") from None
