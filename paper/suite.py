"""The training runs and evaluations that main, single and control share, on disk.

    WORK/q2/ppo-0/                      a run directory of `memopd train`: arm, seed
    WORK/evaluations/test/ppo-0-q8.json one system, one seed, one horizon, with the measures of every task
    WORK/logs/                          the output of the processes

Existing parts are reused, so after an interruption the same command continues where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memopd.config import RunConfig, from_tables, load_config
from memopd.files import whole
from memopd.train.log import read_metrics
from paper.evaluation import Part, Plan, is_made
from paper.jobs import Job, run_jobs
from paper.settings import ARMS, Suite


@dataclass(frozen=True, slots=True)
class Work:
    """One suite in one folder."""

    suite: Suite
    folder: Path
    wanted: tuple[tuple[str, int], ...]  # system, horizon
    split: str = "test"
    overrides: tuple[tuple[str, str], ...] = ()  # changes to training.toml, for example ("optimise.lr", "1e-5")

    @property
    def arms(self) -> list[str]:
        return [arm for arm in self.suite.arms if any(system == arm for system, _ in self.wanted)]

    # ---- training ----------------------------------------------------------------------------------------------

    def run_of(self, arm: str, seed: int) -> Path:
        return self.folder / "q2" / f"{arm}-{seed}"

    def config_of(self, arm: str, seed: int) -> RunConfig:
        own = {"teacher.state": ARMS[arm], "run.seed": str(seed)}
        return load_config(self.suite.training, dict(self.overrides) | own)

    def training_jobs(self) -> Iterator[Job]:
        """One seed after the other, so that an early end leaves complete comparisons."""
        for seed in self.suite.seeds:
            for arm in self.arms:
                yield self._training_job(arm, seed)

    def _training_job(self, arm: str, seed: int) -> Job:
        run, config = self.run_of(arm, seed), self.config_of(arm, seed)

        def command() -> list[str]:
            own = {**dict(self.overrides), "teacher.state": ARMS[arm], "run.seed": str(seed)}
            fields = [f"--{name}={value}" for name, value in own.items()]
            line = [sys.executable, "-m", "memopd.cli", "train", self.suite.training, "--output", str(run), *fields]
            return [*line, "--resume"] if run.is_dir() else line

        def finished() -> bool:
            if not (run / "model" / "config.json").is_file():
                return False
            if from_tables(json.loads((run / "config.json").read_text()), str(run)) != config:
                raise ValueError(f"{run}: was trained with other settings; remove it, or choose another --work")
            return True

        def progress() -> str:
            lines = read_metrics(run)
            return f"{lines[-1]['step'] + 1}/{config.optimise.steps}" if lines else ""

        return Job(f"train {run.name}", command, finished, self.folder / "logs" / f"train-{run.name}.log", progress)

    # ---- evaluation --------------------------------------------------------------------------------------------

    def result_of(self, system: str, seed: int, k: int) -> Path:
        return self.folder / "evaluations" / self.split / f"{system.replace(':', '-')}-{seed}-q{k}.json"

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """One process per model and seed, which loads the model once for all horizons and rules."""
        base = load_config(self.suite.training, dict(self.overrides))
        for who, model in (("student", base.model.student), ("teacher", base.model.teacher)):
            fixed = [(s, k) for s, k in self.wanted if s.partition("-")[0] == who]
            for seed in sorted({seed for s, _ in fixed for seed in self.suite.seeds_of(s)}):
                of_seed = [(s, k) for s, k in fixed if seed in self.suite.seeds_of(s)]
                yield f"{who}-{seed}", self._plan(model, [(s, seed, k, s.partition("-")[2]) for s, k in of_seed])
        for seed in self.suite.seeds:
            for arm in self.arms:
                parts = [(s, seed, k, base.tasks.memory) for s, k in self.wanted if s == arm]
                yield f"{arm}-{seed}", self._plan(str(self.run_of(arm, seed) / "model"), parts)

    def _plan(self, model: str, parts: Sequence[tuple[str, int, int, str]]) -> Plan:
        e = self.suite.evaluation
        made = [
            Part(s, seed, k, rule, e.tasks.format(split=self.split, k=k), str(self.result_of(s, seed, k)),
                 self.suite.concurrent)
            for s, seed, k, rule in parts
        ]  # fmt: skip
        return Plan(model, tuple(made), e)

    def evaluation_jobs(self) -> Iterator[Job]:
        for name, plan in self.plans():
            if not Path(plan.model, "config.json").is_file() and not all(is_made(plan, p) for p in plan.parts):
                continue  # its training did not finish, which is reported when results are collected
            yield self._evaluation_job(name, plan)

    def _evaluation_job(self, name: str, plan: Plan) -> Job:
        file = self.folder / "logs" / f"evaluate-{self.split}-{name}.plan.json"

        def command() -> Sequence[str]:
            with whole(file) as partial:
                partial.write_text(plan.as_json())
            return [sys.executable, "-m", "paper.evaluation", str(file)]

        return Job(
            f"evaluate {name} on {self.split}",
            command,
            lambda: all(is_made(plan, part) for part in plan.parts),
            self.folder / "logs" / f"evaluate-{self.split}-{name}.log",
            lambda: f"{sum(is_made(plan, p) for p in plan.parts)}/{len(plan.parts)}",
        )


def make(work: Work) -> dict[str, str]:
    """Make all training runs, then all evaluations. Return the failed jobs."""
    with locked(work.folder):
        failed = run_jobs(list(work.training_jobs()), work.suite.concurrent)
        return failed | run_jobs(list(work.evaluation_jobs()), work.suite.concurrent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep two commands from writing the same runs. The lock disappears with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another command is using it; wait, or choose another --work") from None
        yield
