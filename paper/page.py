"""Files of an experiment: JSON for programs, Markdown for a reader, the paper's figures beside ours."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import memopd
from memopd.files import whole
from paper.settings import Paper


def provenance(machines: Sequence[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """How the numbers came about."""
    return {
        "command": shlex.join(["memopd", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "memopd": memopd.__version__,
        "machines": list(machines),
        "settings": settings,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(_plain(content), indent=1, ensure_ascii=False) + "\n")


def write_markdown(
    path: Path, title: str, made: dict[str, Any], body: Sequence[str], paper: Paper, differs: str
) -> None:
    where = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in made["machines"]) or "not recorded"
    parts = [f"# {title}", f"`{made['command']}`, {made['date']}. Measured on: {where}.", *body]
    if made.get("missing"):
        parts.append("Missing, and not in any number above: " + "; ".join(made["missing"]) + ".")
    _write(path, [*parts, *_closing(paper, differs)])


def reword(numbers: Path, page: Path, paper: Paper, differs: str) -> None:
    """The paper's figures and the reason anew, under a table that was made before."""
    if not numbers.is_file() or not page.is_file():
        raise ValueError(f"{numbers}: there is nothing to show yet; run the experiment without --collect")
    write_json(numbers, json.loads(numbers.read_text()) | paper_dict(paper, differs))
    above = page.read_text()
    for heading in (PAPER, REASON):
        above = above.partition(f"\n{heading}\n")[0]
    _write(page, [above.rstrip(), *_closing(paper, differs)])


PAPER, REASON = "## The paper", "## Why ours differ"


def _closing(paper: Paper, differs: str) -> list[str]:
    parts = [PAPER, paper.caption, markdown_table(paper.columns, paper.rows)] if paper.rows else []
    return [*parts, REASON, differs.strip()] if differs.strip() else parts


def _write(path: Path, parts: Sequence[str]) -> None:
    with whole(path) as partial:
        partial.write_text("\n\n".join(part for part in parts if part) + "\n")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    marks = ["---", *["---:"] * (len(columns) - 1)]
    lines = [columns, marks, *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def paper_dict(paper: Paper, differs: str) -> dict[str, Any]:
    return {"paper": asdict(paper), "differs": differs.strip()}


def _plain(value: Any) -> Any:
    """What was not measured is null, not NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
