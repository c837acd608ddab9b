"""Measures training updates by stage: packed and unshared, all weights and LoRA, here and in another source tree.

Every arm is the training loop itself, in a process of its own (`step_arm`), on the same tasks with the same budget. The
learning rates are 0, so that every arm samples the same episodes in the same step; the optimisers work all the same.
Arms of two trees take turns. The first update warms up and is not counted; medians of the others are reported.

Compiling takes minutes. If the arms fit into memory side by side, all of them can warm up at once and then take turns:
while one is measured, the others wait.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from memopd.config import RunConfig

ROOT = Path(__file__).parent.parent
STAGES = ("sample", "compile", "score", "advantages", "update")
READY, GO = "ready", "go"  # files of an arm that takes turns: it is warm, and it is its turn


@dataclass(frozen=True, slots=True)
class StepStage:
    name: str
    seconds: float
    peak_bytes: int  # of the whole device, during the stage; 0 on a CPU


@dataclass(frozen=True, slots=True)
class StepResult:
    tree: str  # here, or against
    step_arm: str
    critic: bool
    student: str
    teacher: str
    episodes: int
    seconds: float  # of a whole update, median
    rounds: int
    updates: int  # that were counted, in all rounds
    rows_saved: float  # the share of rows that packing saves
    stages: tuple[StepStage, ...]
    memory: dict[str, int]
    kernels: dict[str, Any]
    sampler: tuple[dict[str, float], ...]

    @property
    def per_hour(self) -> float:
        return 3600 / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "updates_per_hour": self.per_hour}


def settings_of(config: RunConfig, arm: str, steps: int, rank: int, critic: bool) -> RunConfig:
    """The configuration of one arm."""
    layout, trained = arm.split("-")
    per_step = config.optimise.tasks * config.optimise.samples
    optimise = replace(
        config.optimise,
        lr=0.0,
        critic_lr=0.0,
        steps=steps + 2,  # the arm stops before the end, which would write a checkpoint
        share=layout == "packed",
        algorithm="ppo" if critic else "grpo",
        mini_batch=per_step,
    )
    lora = replace(config.lora, rank=rank if trained == "lora" else 0)
    model = replace(config.model, adapter="")  # all arms start from the same weights
    run = replace(config.run, check_every=0, dev_every=0, save_every=10**6)
    return replace(config, model=model, optimise=optimise, lora=lora, run=run)


def run_step(
    config: RunConfig,
    arms: Sequence[str],
    steps: int,
    rank: int,
    critic: bool,
    against: str | None = None,
    rounds: int = 1,
    profile: bool = False,
    together: bool = False,
) -> Iterator[StepResult]:
    with source_tree(against) as other:
        trees = {"here": ROOT, **({"against": other} if other else {})}
        chosen = {arm: settings_of(config, arm, steps, rank, critic) for arm in arms}
        if together:
            order = [(arm, name) for arm in arms for name in trees]
            started = [(chosen[arm], trees[name], steps, profile and name == "here") for arm, name in order]
            for (arm, name), made in zip(order, run_together(started), strict=True):
                yield result_of(chosen[arm], name, arm, [made])
            return
        for arm in arms:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
            for turn in range(rounds):
                for name, tree in trees.items():
                    print(f"step: {arm}, {name}", file=sys.stderr, flush=True)
                    found[name].append(run_arm(chosen[arm], tree, steps, profile and name == "here"))
                    if turn == rounds - 1:  # at once: what was measured is kept if the command is stopped
                        yield result_of(chosen[arm], name, arm, found[name])


def run_arm(config: RunConfig, tree: Path, steps: int, profile: bool) -> dict[str, Any]:
    with Arm(config, tree, steps, profile) as arm:
        return arm.result()


def run_together(arms: Sequence[tuple[RunConfig, Path, int, bool]]) -> Iterator[dict[str, Any]]:
    """Start all arms, and let them go on one after the other once all are warm."""
    with ExitStack() as stack:
        started = [stack.enter_context(Arm(*arm, waits=True)) for arm in arms]
        while not all(arm.ready() for arm in started):
            time.sleep(0.2)
        for arm in started:
            arm.go()
            yield arm.result()


class Arm:
    """One arm in a process of its own, with the memopd of `tree`. With `waits`, it stops when warm, until `go`."""

    def __init__(self, config: RunConfig, tree: Path, steps: int, profile: bool, waits: bool = False) -> None:
        self.config, self.tree = config, tree
        self.flags = [str(steps), *(["--profile"] if profile else []), *(["--wait"] if waits else [])]

    def __enter__(self) -> Arm:
        self._folder = TemporaryDirectory()
        self.folder = Path(self._folder.name)
        (self.folder / "config.json").write_text(json.dumps(changed_settings(self.config)))
        command = [sys.executable, str(Path(__file__).with_name("step_arm.py")), f"{self.folder}/config.json"]
        path = os.pathsep.join([str(self.tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.folder), *self.flags], env={**os.environ, "PYTHONPATH": path},
                stdout=sys.stderr, stderr=log,
            )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()

    def ready(self) -> bool:
        """Whether it is warm. One that ended before that has failed."""
        if self.process.poll() is not None:
            self.result()
        return (self.folder / READY).exists()

    def go(self) -> None:
        (self.folder / GO).touch()

    def result(self) -> dict[str, Any]:
        if self.process.wait():
            last = (self.folder / "log").read_text(errors="replace").strip().splitlines()[-3:]
            raise ValueError(f"{self.tree}: the training failed: {' '.join(last)}")
        made: dict[str, Any] = json.loads((self.folder / "arm.json").read_text())
        return made


def changed_settings(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The settings that are not the defaults: another tree may not know all of ours."""
    ours, defaults = (json.loads(c.as_json()) for c in (config, RunConfig()))
    return {
        name: {key: value for key, value in section.items() if value != defaults[name][key]}
        for name, section in ours.items()
    }


def result_of(config: RunConfig, tree: str, arm: str, runs: Sequence[dict[str, Any]]) -> StepResult:
    counted = [step for run in runs for step in run["steps"][1:]]
    names = dict.fromkeys((*STAGES, *(name for step in counted for name in step["stages"])))

    def stage(name: str) -> StepStage:
        there = [step["stages"].get(name, {"seconds": 0.0, "peak_bytes": 0}) for step in counted]
        return StepStage(name, median(s["seconds"] for s in there), max(int(s["peak_bytes"]) for s in there))

    other = median(step["seconds"] - sum(s["seconds"] for s in step["stages"].values()) for step in counted)
    stages = (*(stage(name) for name in names), StepStage("other", other, 0))
    return StepResult(
        tree, arm, config.optimise.algorithm == "ppo", Path(config.model.student).name, Path(config.model.teacher).name,
        config.optimise.tasks * config.optimise.samples, median(s["seconds"] for s in counted), len(runs), len(counted),
        counted[-1]["metrics"].get("rows_saved", 0.0), stages, runs[-1]["memory"], runs[-1]["kernels"],
        tuple(runs[-1]["sampler"]),
    )  # fmt: skip


@contextmanager
def source_tree(against: str | None) -> Iterator[Path | None]:
    """The folder of another source tree: `against` itself, or that commit of this repository, unpacked for a while."""
    if against is None or (Path(against) / "src" / "memopd").is_dir():
        yield None if against is None else Path(against).resolve()
        return
    done = subprocess.run(["git", "archive", against, "src"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"--against {against}: neither a folder with src/memopd nor a commit of this repository")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)
