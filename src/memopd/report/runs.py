"""Reads run directories, and groups the seeds of one arm."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopd.evaluate.provenance import warn_changed
from memopd.files import read_object
from memopd.train.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class Run:
    path: Path
    name: str  # the shortest that distinguishes it from the others
    config: dict[str, dict[str, Any]]  # with all defaults
    metrics: list[dict[str, Any]]  # one line per step
    equivalence: dict[int, dict[str, Any]]  # by step
    evaluations: dict[str, dict[str, Any]]  # by NAME: the output of `memopd evaluate -o RUN/evaluation/NAME.json`
    audits: dict[str, dict[str, Any]]  # by NAME: the output of `memopd audit -o RUN/audit/NAME.json`


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs whose settings differ in the seed alone."""

    label: str
    runs: tuple[int, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    if len({p.resolve() for p in paths}) < len(paths):
        raise ValueError("a run directory was given twice")
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _read_run(path: Path, name: str) -> Run:
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: not a run directory (it has no config.json): give an --output of memopd train or sft"
        )
    # Evaluations from before the training come first; otherwise the order is by name.
    files = sorted(path.glob("evaluation/*.json"), key=lambda f: (not f.stem.startswith("before"), f.stem))
    evaluations = {f.stem: read_object(f) for f in files}
    for stem, evaluation in evaluations.items():
        if not {"results", "tasks"} <= evaluation.keys():
            raise ValueError(
                f"{path / 'evaluation' / stem}.json: not written by `memopd evaluate -o`; move it elsewhere"
            )
        warn_changed(path / "evaluation" / f"{stem}.json", evaluation.get("provenance", {}))
    config = read_object(path / "config.json")
    if not all(isinstance(section, dict) for section in config.values()):
        raise ValueError(f"{path / 'config.json'}: not the configuration of a run; it consists of sections")
    return Run(path, name, config, read_metrics(path), _checks(path), evaluations, _audits(path))


def _audits(path: Path) -> dict[str, dict[str, Any]]:
    audits = {f.stem: read_object(f) for f in sorted(path.glob("audit/*.json"))}
    for stem, audit in audits.items():
        if not {"representations", "rounding", "arms", "student", "teacher", "equivalence"} <= audit.keys():
            raise ValueError(f"{path / 'audit' / stem}.json: not written by `memopd audit -o`; move it elsewhere")
    return audits


def _checks(path: Path) -> dict[int, dict[str, Any]]:
    """The checks by step. If half precision could not decide, the later file `step-000000-float32` wins."""
    files = sorted(path.glob("equivalence/step-*.json"), key=lambda f: f.stem)
    return {int(f.stem.split("-")[1]): read_object(f) for f in files}


def _names(paths: Sequence[Path]) -> list[str]:
    """For one run, the folder's name; for several, their paths below the common folder."""
    whole = [p.resolve() for p in paths]
    if len(whole) == 1:
        return [whole[0].name]
    above = Path(os.path.commonpath(whole))
    return [str(p.relative_to(above)) if p != above else p.name for p in whole]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    members: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        config = {s: {k: v for k, v in values.items() if (s, k) != ("run", "seed")} for s, values in run.config.items()}
        members.setdefault(json.dumps(config, sort_keys=True), []).append(i)
    return [Arm(_label([runs[i].name for i in group]), tuple(group)) for group in members.values()]


def _label(names: list[str]) -> str:
    """The common name of an arm's runs, without the seed.

    >>> _label(["memopd/seed-0", "memopd/seed-1"]), _label(["ppo-s0", "ppo-s1"]), _label(["ppo"])
    ('memopd', 'ppo', 'ppo')
    """
    common = {re.sub(r"[-_/]*(seed|s)?[-_]?\d+$", "", name) for name in names} if len(names) > 1 else set(names)
    return common.pop() if len(common) == 1 and "" not in common else ", ".join(names)
