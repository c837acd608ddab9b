"""Writes the files of an experiment: JSON, Markdown with the paper's numbers beside ours, and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table
from memopd.cli.options import plain
from memopd.evaluate.provenance import provenance as made_by
from memopd.evaluate.provenance import warn_changed
from memopd.files import whole
from paper.settings import Choices, Recorded, Shown

Settings = Shown | Recorded | Choices
PAPER, REASON = "## The paper", "## Why ours differ"


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of an experiment."""

    numbers: dict[str, Any]
    body: list[str]  # Markdown
    draw: Callable[[Path], None]
    passed: bool = True  # packing was exact


def provenance(
    machines: Sequence[dict[str, str]], settings: dict[str, Any], inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How the numbers were made; `inputs` are the paths of what was read."""
    return made_by(settings, inputs or {}, "python -m paper") | {"machines": list(machines)}


def write_page(name: str, settings: Settings, how: dict[str, Any], found: Findings, output: Path) -> list[Path]:
    """Write OUTPUT/NAME.json, .md and .png; `how` is their provenance."""
    numbers, page, picture = paths = [output / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    made = how | {"experiment": name} | found.numbers | _words(settings)
    _write_json(numbers, made)
    _write(page, _page(name, settings, made, found.body, found.passed))
    found.draw(picture)
    return paths


def reword(name: str, settings: Recorded, output: Path) -> list[Path]:
    """Update the paper's numbers and the reasons under an existing table, without measuring again."""
    made = recorded(name, output)
    numbers, page = paths = [output / f"{name}{suffix}" for suffix in (".json", ".md")]
    _write_json(numbers, made | _words(settings))
    above = page.read_text()
    for heading in (PAPER, REASON):
        above = above.partition(f"\n{heading}\n")[0]
    _write(page, [above.rstrip(), *_closing(settings)])
    return paths


def rewrite(name: str, settings: Shown, made: dict[str, Any], body: list[str], output: Path) -> list[Path]:
    """Write the page of recorded results again, with another body; the picture stays."""
    numbers, page = paths = [output / f"{name}{suffix}" for suffix in (".json", ".md")]
    made |= _words(settings)
    _write_json(numbers, made)
    _write(page, _page(name, settings, made, body))
    return paths


def recorded(name: str, output: Path) -> dict[str, Any]:
    """The results of an earlier run. Says so if what they were measured on has changed since."""
    numbers = output / f"{name}.json"
    if not numbers.is_file() or not numbers.with_suffix(".md").is_file():
        raise ValueError(f"{numbers}: there is no result yet; run the experiment without --collect")
    made: dict[str, Any] = json.loads(numbers.read_text())
    warn_changed(numbers, made)
    return made


def _page(name: str, settings: Settings, made: dict[str, Any], body: Sequence[str], passed: bool = True) -> list[str]:
    where = "; ".join(", ".join(f"{k} {v}" for k, v in m.items()) for m in made["machines"]) or "not recorded"
    parts = [
        f"# {settings.title}",
        f"`{made['command']}`, {made['date']}, {_code(made)}. Measured on: {where}.",
        f"![]({name}.png)",
        "" if passed else "**Packing was NOT equivalent to the calls run alone: see the JSON.**",
        *body,
    ]
    if missing := made.get("missing"):
        parts.append("Missing, and not in any number above: " + "; ".join(missing) + ".")
    return [*parts, *_closing(settings)]


def _code(made: dict[str, Any]) -> str:
    """The version of the code that made the results."""
    if made.get("commit") is None:
        return f"memopd {made['memopd']} (its commit was not recorded)"
    return f"commit {made['commit'][:12]}" + (" with changes" if made["dirty"] else "")


def _closing(settings: Settings) -> list[str]:
    paper, differs = settings.paper, settings.differs.strip()
    parts = [PAPER, paper.caption, markdown_table(paper.columns, paper.rows)] if paper.rows else []
    return [*parts, REASON, differs] if differs else parts


def _words(settings: Settings) -> dict[str, Any]:
    return {"paper": asdict(settings.paper), "differs": settings.differs.strip()}


def _write(path: Path, parts: Sequence[str]) -> None:
    with whole(path) as partial:
        partial.write_text("\n\n".join(part for part in parts if part) + "\n")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole(path) as partial:
        partial.write_text(json.dumps(plain(content), indent=1, ensure_ascii=False) + "\n")
