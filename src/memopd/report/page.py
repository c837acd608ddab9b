"""One self-contained page: the data as a JSON block, and a script that shows it as text.

The page contains text that a model wrote, and three measures keep it from being interpreted as markup or code. The JSON
block never contains `<`, so that no tag can end it. The script puts data on the page only as text nodes. And the page's
security policy runs no script but the one whose digest it names, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from memopd.files import whole
from memopd.report.curves import ends, groups, series, stages
from memopd.report.episodes import episodes_of, indexed, vocabulary
from memopd.report.evaluations import tables
from memopd.report.runs import Run, arms_of, read_runs

EPISODES_BYTES = 2_000_000  # of JSON for all runs together, for a page of at most about 3 MB
STYLES = ("style", "viewer")
SCRIPTS = ("dom", "charts", "sections", "passages", "contexts", "search", "viewer", "main")


def write_report(
    paths: Sequence[Path],
    output: Path,
    progress: Callable[[str, Iterable[Run]], Iterable[Run]] = lambda _, items: items,
) -> dict[str, Any]:
    """Write the page, and return a description of it."""
    runs = read_runs(paths)
    data = page_data(runs, progress)
    text = page(data)
    with whole(output) as file:
        file.write_text(text, encoding="utf-8")
    episodes = sum(len(run["episodes"]) for run in data["runs"])
    return {"page": str(output), "bytes": len(text.encode()), "runs": len(runs), "episodes": episodes}


def page_data(
    runs: Sequence[Run], progress: Callable[[str, Iterable[Run]], Iterable[Run]] = lambda _, items: items
) -> dict[str, Any]:
    """Everything that the page shows."""
    return {
        "title": ", ".join(arm.label for arm in arms_of(runs)),
        "arms": [{"label": arm.label, "runs": arm.runs} for arm in arms_of(runs)],
        "charts": groups([run.metrics for run in runs]),
        "evaluations": tables(runs),
        "runs": [_run_data(run, EPISODES_BYTES // len(runs)) for run in progress("episodes", runs)],
    }


def _run_data(run: Run, budget: int) -> dict[str, Any]:
    episodes, ids = episodes_of(run, budget)
    words = vocabulary(run, ids)
    return {
        "name": run.name,
        "config": run.config,
        "steps": run.metrics[-1]["step"] + 1 if run.metrics else 0,
        "series": series(run.metrics),
        "ends": ends(run.metrics),
        "seconds": stages(run.metrics),
        "equivalence": [{"step": step + 1} | report for step, report in run.equivalence.items()],
        "audits": [_audit_data(name, audit) for name, audit in run.audits.items()],
        "episodes": episodes,
        "pool": indexed(ids, words["ids"]),
        "vocabulary": words,
    }


def _audit_data(name: str, audit: dict[str, Any]) -> dict[str, Any]:
    shown = ("model", "passed", "representations", "rounding", "arms", "student", "teacher", "notes")
    figures = ("dtype", "precise", "calls", "decisions", "rows", "tokens", "error", "tolerance")
    return {"name": name} | {key: audit[key] for key in shown} | {key: audit["equivalence"][key] for key in figures}


def page(data: dict[str, Any]) -> str:
    style = "".join(part(f"{name}.css") for name in STYLES)
    body = "\n".join(part(f"{name}.js") for name in SCRIPTS)
    script = f'"use strict";\n{{\n{body}\n}}\n'  # in a block, so that nothing is global
    return Template(part("page.html")).substitute(
        title=html.escape(data["title"]),
        policy=f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
        style=style,
        script=script,
        data=embedded(data),
    )


def part(name: str) -> str:
    return (files("memopd.report") / "page" / name).read_text("utf-8")


def embedded(data: Any) -> str:
    """JSON for a <script> block. It contains no `<`, so no text in it can end the block."""
    return json.dumps(_plain(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    """Round numbers to five digits; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
