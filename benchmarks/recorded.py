"""The lines that a benchmark wrote with --json, as JSON has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values = json.loads(line, parse_constant=lambda _: float("nan"))
            if not isinstance(values, dict):
                raise TypeError(f"{type(values).__name__}, not an object")
        except (TypeError, ValueError) as why:
            raise ValueError(f"{path}: line {number}: not a result of python -m benchmarks ({why!r})") from None
        lines.append(values)
    return lines
