"""Reads the metrics of a run. It must not import torch, because `memopd report` needs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopd.files import json_lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read complete lines only, because a killed run may have left half a line."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        return []
    found = []
    for number, line in json_lines(file, finished=True):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{file}: line {number}: has no step; not written by memopd train or sft")
        found.append(line)
    return found
