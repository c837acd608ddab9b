"""What the verbs share: options, consoles, progress, models from disk. No torch before a verb runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

out = Console(width=None if sys.stdout.isatty() else 140)  # files and pipes get whole tables
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(StrEnum):
    auto = "auto"
    dense = "dense"
    flex = "flex"
    cascade = "cascade"


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
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = os.path.expanduser(path)
    if looks_local(path) and not Path(path, "config.json").is_file():
        raise ValueError(f"{path}: there is no model here (no config.json)")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    return model.to(device()).eval()


def looks_local(path: str) -> bool:
    """A path rather than a hub name, which has at most one slash and no leading dot or slash."""
    return Path(path).exists() or path.startswith((".", "/")) or path.count("/") > 1


def numbers(text: str, separator: str = ",") -> list[int]:
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise ValueError(f"expected whole numbers separated by {separator!r}, got {text!r}") from None
