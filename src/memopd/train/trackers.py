"""Sends the metrics of a run to Weights & Biases or trackio too, if `run.trackers` names them.

A tracker shows a copy; RUN/metrics.jsonl is the record. So a tracker that fails, at the start or later, is reported
once and not used again by this process, and training continues. Everything else about it (login, offline mode,
project, server) is set by its own environment variables.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from memopd.config import RunConfig
from memopd.files import whole

log = logging.getLogger("memopd")

FILE = "trackers.json"  # in the run directory: the id under which a resumed run continues


def check_trackers(names: Sequence[str]) -> None:
    """Check that the trackers exist and are installed. Called before any model is loaded."""
    for name in names:
        if name not in OPEN:
            raise ValueError(f"run.trackers: {name!r} is not one of {', '.join(OPEN)}")
        found = find_spec(name)
        if found is None or found.origin is None:  # no origin: a folder of that name, such as wandb's own output
            raise ValueError(f"run.trackers: {name} is not installed: pip install 'memopd[{name}]'")


@dataclass(slots=True)
class Tracker:
    name: str
    run: Any  # None after a failure

    def log(self, step: int, values: dict[str, float]) -> None:
        self._attempt(lambda: self.run.log(values, step=step))

    def finish(self) -> None:
        self._attempt(lambda: self.run.finish())

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.run is None:
            return
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the command's own result
                action()
        except Exception as error:  # a tracker may raise anything, for example any error of its network library
            _report(self.name, error)
            self.run = None


def open_trackers(names: Sequence[str], path: Path, config: RunConfig) -> list[Tracker]:
    """Open the run of every tracker: a new one, or the one with which the run directory began."""
    if not names:
        return []
    id, settings, opened = _id(path), json.loads(config.as_json()), []
    for name in names:
        try:
            with redirect_stdout(sys.stderr):
                opened.append(Tracker(name, OPEN[name](path.resolve(), id, settings)))
        except Exception as error:
            _report(name, error)
    return opened


def _id(path: Path) -> str:
    file = path / FILE
    if not file.is_file():
        with whole(file) as partial:
            partial.write_text(json.dumps({"id": uuid4().hex[:12]}) + "\n")
    return str(json.loads(file.read_text())["id"])


def _report(name: str, error: Exception) -> None:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    log.warning("run.trackers: %s failed and gets no more metrics; metrics.jsonl has all of them (%s)", name, why)


def _wandb(path: Path, id: str, settings: dict[str, Any]) -> Any:
    project = os.environ.get("WANDB_PROJECT", "memopd")
    return import_module("wandb").init(
        project=project, name=path.name, id=id, resume="allow", dir=path, config=settings
    )


def _trackio(path: Path, id: str, settings: dict[str, Any]) -> Any:
    """trackio knows a run by its name, so the name includes the id."""
    project = os.environ.get("TRACKIO_PROJECT", "memopd")
    return import_module("trackio").init(project=project, name=f"{path.name}-{id}", resume="allow", config=settings)


OPEN: dict[str, Callable[[Path, str, dict[str, Any]], Any]] = {"wandb": _wandb, "trackio": _trackio}
