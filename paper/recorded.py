"""state, rules, corruption, domain and packing: measured on a model's own recorded trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memopd.types import Episode
from memopd.verify.audit import Progress
from paper.page import paper_dict, provenance, reword, write_json, write_markdown
from paper.settings import Recorded
from paper.trajectories import Subject


@dataclass(frozen=True, slots=True)
class Findings:
    numbers: dict[str, Any]
    body: list[str]  # Markdown
    draw: Callable[[Path], None]
    passed: bool = True  # packing was exact


def run_recorded(
    name: str, settings: Recorded, work: Path, output: Path, progress: Progress
) -> tuple[list[Path], bool]:
    """Write OUTPUT/NAME.json, .md and .png."""
    from benchmarks.timing import machine
    from paper import corruption, domain, packing, rules, state

    measure: dict[str, Callable[[Subject], Findings]] = {
        "state": state.measure,
        "rules": rules.measure,
        "corruption": corruption.measure,
        "domain": domain.measure,
        "packing": packing.measure,
    }
    found = measure[name](Subject(settings, work, progress))
    made = provenance([machine()], asdict(settings)) | {"experiment": name, "passed": found.passed, **found.numbers}
    made |= paper_dict(settings.paper, settings.differs)
    paths = [output / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    write_json(paths[0], made)
    verdict = [] if found.passed else ["**Packing was NOT equivalent to the calls run alone: see the JSON.**"]
    body = [f"![]({name}.png)", *verdict, *found.body]
    write_markdown(paths[1], settings.title, made, body, settings.paper, settings.differs)
    found.draw(paths[2])
    return paths, found.passed


def collect_recorded(name: str, settings: Recorded, output: Path) -> list[Path]:
    """Nothing is measured: only the words around the numbers are those of the configuration again."""
    paths = [output / f"{name}{suffix}" for suffix in (".json", ".md")]
    reword(paths[0], paths[1], settings.paper, settings.differs)
    return paths


def counts(episodes: Sequence[Episode]) -> dict[str, int]:
    calls = [c for e in episodes for c in e.calls]
    sampled = sum(len(c.completion) for c in calls if c.trainable)
    return {"trajectories": len(episodes), "calls": len(calls), "sampled_tokens": sampled}


def sentence(settings: Recorded, counted: dict[str, int]) -> str:
    return (
        f"{counted['trajectories']} trajectories of `{settings.model}`, {counted['calls']:,} calls, "
        f"{counted['sampled_tokens']:,} sampled tokens; {settings.dtype}."
    )
