"""The run directory: configuration, metrics, the episodes of every step. `--resume` cuts them back to a checkpoint.

RUN/config.json      as resolved          RUN/episodes/step-000012.parquet   the episodes of a step
RUN/metrics.jsonl    a line per step      RUN/checkpoints/                   see checkpoint.py
RUN/tensorboard/     the same metrics     RUN/traces/step-000012.parquet     numbers of the update: see traces.py
RUN/trackers.json    see trackers.py
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopd.config import RunConfig, from_tables
from memopd.files import read_object, remove_leftovers, sync, whole
from memopd.record import write_episodes
from memopd.train import ranks, trackers
from memopd.train.checkpoint import latest, read_state
from memopd.train.metrics import read_metrics
from memopd.train.traces import Trace, write_traces
from memopd.types import Episode

log = logging.getLogger("memopd")


@dataclass(slots=True)
class Run:
    """An opened run directory. Only rank 0 writes."""

    path: Path
    first: int  # the step to start with
    checkpoint: Path | None
    writer: Any = None
    trackers: list[trackers.Tracker] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per stage of the current step
    now: str = ""  # the current step, as a terminal shows it
    shown: Any = None  # the lines of a terminal about the current stage

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        for tracker in self.trackers:
            tracker.finish()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and show it on a terminal, because a step may take minutes."""
        begin = time.perf_counter()
        try:
            with self._lines(f"{self.now}{name}") as self.shown:
                yield
        finally:
            self.shown = None
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def steps(self, last: int) -> Iterator[int]:
        """The numbers of the steps that are left."""
        for step in range(self.first, last):
            self.now = f"step {step + 1}/{last}  "
            yield step

    def progress(self, what: str, items: Sequence[Any]) -> Iterable[Any]:
        """Count the items of a part of the stage on the terminal."""
        return self.count(what, items, len(items))

    def count(self, what: str, items: Iterable[Any], total: int) -> Iterable[Any]:
        return items if self.shown is None else self._counted(what, items, total)

    def _counted(self, what: str, items: Iterable[Any], total: int) -> Iterator[Any]:
        line = self.shown.add_task(what, total=None)
        for number, item in enumerate(items, 1):
            self.shown.update(line, description=f"  {what} {number}/{total}")
            yield item
        self.shown.remove_task(line)

    def _lines(self, stage: str) -> AbstractContextManager[Any]:
        if ranks.rank() != 0 or not sys.stderr.isatty():
            return nullcontext()
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        shown = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2)
        shown.add_task(stage, total=None)
        return shown

    def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        if ranks.rank() == 0:
            write_episodes(self.path / "episodes" / f"step-{step:06d}.parquet", episodes, overwrite=True)

    def ahead(self, batches: Mapping[int, Sequence[Episode]]) -> None:
        """Write batches of later steps before a checkpoint: who resumes it does not have the weights to sample them."""
        for step, episodes in batches.items():
            self.episodes(step, episodes)

    def traces(self, step: int, traces: Sequence[Trace]) -> None:
        if ranks.rank() == 0:
            write_traces(self.path / "traces" / f"step-{step:06d}.parquet", traces)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Write one line, with the seconds per stage."""
        values = values | {f"seconds_{name}": round(s, 4) for name, s in self.seconds.items()}
        self.seconds = {}
        if ranks.rank() != 0:
            return
        line = {"step": step} | {k: v if math.isfinite(v) else None for k, v in values.items() if k != "step"}
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        sync(self.path / "metrics.jsonl")  # before a checkpoint that includes this step
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
        finite = {name: value for name, value in line.items() if value is not None and name != "step"}
        for tracker in self.trackers:
            tracker.log(step, finite)


def open_run(path: Path, config: RunConfig, resume: bool) -> Run:
    """Open a new directory, or one to resume; removes what a killed run wrote after its last checkpoint."""
    trackers.check_trackers(config.run.trackers)
    there = [f.name for f in path.iterdir() if not f.name.startswith(".")] if path.is_dir() else []
    if set(there) <= {"config.json", "tensorboard", trackers.FILE, "wandb"}:
        there = []  # a run that stopped before its first step: treat the directory as new
    ranks.barrier()
    if there and not resume:
        raise ValueError(f"{path}: exists already; continue it with --resume, or choose another --output")
    if resume and "config.json" not in there and (there or not path.is_dir()):
        raise ValueError(f"{path}: there is no run to resume (no config.json)")
    if resume and there:
        before = from_tables(read_object(path / "config.json"), str(path / "config.json"))
        if before != config:
            raise ValueError(
                f"{path}: was started with other settings: {_difference(before, config)}: resume it with those, or "
                "choose another --output"
            )
    checkpoint = latest(path) if resume else None
    first = 0 if checkpoint is None else int(read_state(checkpoint)["step"])
    run = Run(path, first, checkpoint)
    if ranks.rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        if resume:
            _cut_back(path, first, config.sampling.ahead)
            log.info("%s: %s", path, f"continues after step {first}" if first else "no checkpoint yet, starts again")
        if not there:
            with whole(path / "config.json") as file:
                file.write_text(config.as_json())
        from torch.utils.tensorboard import SummaryWriter

        run.writer = SummaryWriter(str(path / "tensorboard"), purge_step=first)
        run.trackers = trackers.open_trackers(config.run.trackers, path, config)
    ranks.barrier()
    return run


def _cut_back(path: Path, first: int, ahead: int) -> None:
    """Remove what came after the checkpoint, except for batches that were sampled ahead and that it needs."""
    needed = range(first, first + ahead if first else 0)
    kept = [line for line in read_metrics(path) if line["step"] < first]
    with whole(path / "metrics.jsonl") as file:
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for part in [*path.glob("episodes/step-*"), *path.glob("traces/step-*"), *path.glob("equivalence/step-*")]:
        step = int(part.stem.split("-")[1])
        if step >= first and not (part.parent.name == "episodes" and step in needed):
            part.unlink()
    for folder in (path, *(f for f in path.iterdir() if f.is_dir())):
        remove_leftovers(folder)


def _difference(before: RunConfig, now: RunConfig) -> str:
    a, b = json.loads(before.as_json()), json.loads(now.as_json())
    changed = [f"{s}.{k} was {a[s][k]!r}, is {b[s][k]!r}" for s in a for k in a[s] if a[s][k] != b[s][k]]
    return "; ".join(changed)
