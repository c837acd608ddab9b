"""Writes the files of an experiment: JSON, Markdown with the paper's numbers beside ours, and a picture."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import memopd
from benchmarks.output import markdown_table
from memopd.cli.options import plain
from memopd.files import whole
from paper.settings import Recorded, Shown

PAPER, REASON = "## The paper", "## Why ours differ"


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of an experiment."""

    numbers: dict[str, Any]
    body: list[str]  # Markdown
    draw: Callable[[Path], None]
    passed: bool = True  # packing was exact


def provenance(machines: Sequence[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """How the numbers were made."""
    return {
        "command": shlex.join(["python", "-m", "paper", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "memopd": memopd.__version__,
        "machines": list(machines),
        "settings": settings,
    }


def write_page(name: str, settings: Shown | Recorded, how: dict[str, Any], found: Findings, output: Path) -> list[Path]:
    """Write OUTPUT/NAME.json, .md and .png; `how` is their provenance."""
    numbers, page, picture = paths = [output / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    _write_json(numbers, how | {"experiment": name} | found.numbers | _words(settings))
    where = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in how["machines"]) or "not recorded"
    parts = [
        f"# {settings.title}",
        f"`{how['command']}`, {how['date']}. Measured on: {where}.",
        f"![]({name}.png)",
        "" if found.passed else "**Packing was NOT equivalent to the calls run alone: see the JSON.**",
        *found.body,
    ]
    if missing := found.numbers.get("missing"):
        parts.append("Missing, and not in any number above: " + "; ".join(missing) + ".")
    _write(page, [*parts, *_closing(settings)])
    found.draw(picture)
    return paths


def reword(name: str, settings: Recorded, output: Path) -> list[Path]:
    """Update the paper's numbers and the reasons under an existing table, without measuring again."""
    numbers, page = paths = [output / f"{name}{suffix}" for suffix in (".json", ".md")]
    if not numbers.is_file() or not page.is_file():
        raise ValueError(f"{numbers}: there is no result yet; run the experiment without --collect")
    _write_json(numbers, json.loads(numbers.read_text()) | _words(settings))
    above = page.read_text()
    for heading in (PAPER, REASON):
        above = above.partition(f"\n{heading}\n")[0]
    _write(page, [above.rstrip(), *_closing(settings)])
    return paths


def _closing(settings: Shown | Recorded) -> list[str]:
    paper, differs = settings.paper, settings.differs.strip()
    parts = [PAPER, paper.caption, markdown_table(paper.columns, paper.rows)] if paper.rows else []
    return [*parts, REASON, differs] if differs else parts


def _words(settings: Shown | Recorded) -> dict[str, Any]:
    return {"paper": asdict(settings.paper), "differs": settings.differs.strip()}


def _write(path: Path, parts: Sequence[str]) -> None:
    with whole(path) as partial:
        partial.write_text("\n\n".join(part for part in parts if part) + "\n")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n")
