"""Shared by all commands: options, consoles, progress bars and model loading. torch is imported only when needed."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(width=None if sys.stdout.isatty() else 140)  # wide enough for tables in files and pipes
err = Console(stderr=True)

Attention = Annotated[str, typer.Option(help="auto, dense, flex, cascade, or module:Class for your own kernel.")]
Adapter = Annotated[str | None, typer.Option(help="A LoRA adapter of the model: a folder in PEFT's format.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Protocol(StrEnum):
    mem1 = "mem1"


Convention = Annotated[
    Protocol | None,
    typer.Option(
        "--protocol",
        help="Take turns, reward and grading from MEM1's code (in evaluate also how it samples) where you do not set "
        "them; docs/tasks.md compares them with ours.",
    ),
]


def run(app: typer.Typer) -> None:
    """Run a command line: logs go to stderr, and a user's mistake becomes one line instead of a traceback."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs a line for every request
    try:
        app()
    except (ValueError, OSError) as error:  # a user's mistake; any other error is a bug and keeps its traceback
        if os.environ.get("MEMOPD_DEBUG"):
            raise
        err.print(f"memopd: {' '.join(_said(error).split())}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


def _said(error: ValueError | OSError) -> str:
    """An error of the system as we would say it: the file first, no number."""
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


def track(description: str, items: Iterable[Any]) -> Iterable[Any]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    from rich.progress import track as bar

    return bar(items, description=f"{description:<24}", console=err, disable=not err.is_terminal, transient=True)


def check_new(output: Path) -> None:
    """Refuse to replace a result. Called before the work that makes it."""
    if output.exists():
        raise ValueError(f"{output}: already exists; choose another name, or remove it")


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


def load_model(path: str, dtype: Precision, adapter: str | None = None) -> Any:
    """Load a causal LM from a folder or the hub, with an adapter if given: safetensors only, no remote code."""
    import torch

    from memopd.models.load import load_causal_lm

    folder = check_adapter(adapter, path)
    model = load_causal_lm(os.path.expanduser(path), getattr(torch, dtype))
    if folder is not None:
        from memopd.models.adapters import load_adapter

        load_adapter(model, str(folder))
    return model.to(device()).eval()


def load_sampler(path: str, dtype: Precision, adapter: str | None = None) -> Any:
    """The same, for an engine to sample from."""
    from memopd.models.adapters import STUDENT
    from memopd.models.sampled import sampling_model

    return sampling_model(load_model(path, dtype, adapter), STUDENT if adapter else None)


def check_adapter(adapter: str | None, base: str) -> Path | None:
    """The folder of an adapter, after it was checked against its base; None if there is none."""
    if adapter is None:
        return None
    from memopd.models import adapters
    from memopd.models.load import check_model_folder

    folder, base = os.path.expanduser(adapter), os.path.expanduser(base)
    check_model_folder(base)
    adapters.check_adapter(folder, base)
    return Path(folder)


def policy_name(model: str, adapter: str | None) -> str:
    """What results call a policy.

    >>> policy_name("models/student", "runs/lora/adapter")
    'models/student+runs/lora/adapter'
    """
    return f"{model}+{adapter}" if adapter else model


def numbers(text: str, separator: str = ",") -> list[int]:
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise ValueError(f"expected whole numbers separated by {separator!r}, got {text!r}") from None
