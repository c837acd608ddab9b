"""The training runs and evaluations that main, single and control share, on disk.

    WORK/q2/ppo-0/                           a run directory of `memopd train`: arm, seed
    WORK/evaluations/test/ppo-0-q8.json      one system, one seed, one horizon, with the measures of every task
    WORK/evaluations/test/ppo-0-nq-q8.json   the same, of one data set if there are several
    WORK/evaluations/test-mem1/...           the same, sampled by the convention `mem1` of suite.toml
    WORK/logs/                               the output of the processes

Existing parts are reused, so after an interruption the same command continues where it stopped. A finished run needs
only its configuration, its metrics and its model or adapter: paper/bring.py moves these between machines.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from memopd.config import RunConfig, from_tables, load_config
from memopd.files import read_object, whole, whole_folder
from memopd.train.metrics import read_metrics
from paper.evaluation import Part, Plan, is_made
from paper.jobs import Job, Made, run_jobs
from paper.settings import Suite

log = logging.getLogger("memopd")


@dataclass(frozen=True, slots=True)
class Work:
    """One suite in one folder."""

    suite: Suite
    folder: Path
    wanted: tuple[tuple[str, int], ...]  # system, horizon
    split: str = "test"
    overrides: tuple[tuple[str, str], ...] = ()  # changes to training.toml, for example ("optimise.lr", "1e-5")
    convention: str = ""  # of the sampling in the evaluation; empty: that of suite.evaluation

    @property
    def arms(self) -> list[str]:
        return [arm for arm in self.suite.arms if any(system == arm for system, _ in self.wanted)]

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets; one without a name if the tasks are not divided."""
        return self.suite.evaluation.data or ("",)

    def under(self, convention: str) -> Work:
        return replace(self, suite=self.suite.under(convention), convention=convention)

    # ---- what the arms start from --------------------------------------------------------------------------------

    def starting_jobs(self) -> Iterator[Job]:
        for run, config in self.suite.starts.items():
            yield self._starting_job(Path(run), config)

    def _starting_job(self, run: Path, config: str) -> Job:
        def command() -> list[str]:
            line = [sys.executable, "-m", "memopd.cli", "sft", config, "--output", str(run)]
            return [*line, "--resume"] if run.is_dir() else line

        adapter = run / "adapter" / "adapter_config.json"
        return Job(f"sft:{run.name}", command, adapter.is_file, self.folder / "logs" / f"sft-{run.name}.log")

    def needs_of(self, adapters: Sequence[str]) -> tuple[str, ...]:
        """The starting jobs that make these adapters."""
        paths = {Path(adapter) for adapter in adapters if adapter}
        return tuple(f"sft:{Path(run).name}" for run in self.suite.starts if Path(run, "adapter") in paths)

    # ---- training ----------------------------------------------------------------------------------------------

    def first_like(self, arm: str) -> str:
        """The first arm with the same settings. Arms that do not differ, for example in the chosen λ, are one run."""
        config = self.config_of(arm, 0)
        return next(other for other in self.suite.arms if self.config_of(other, 0) == config)

    def run_of(self, arm: str, seed: int) -> Path:
        return self.folder / "q2" / f"{self.first_like(arm)}-{seed}"

    def settings_of(self, arm: str, seed: int) -> dict[str, str]:
        """The changes to training.toml: those of the command line, of the arm, and the seed."""
        own = {name: value if isinstance(value, str) else json.dumps(value)
               for name, value in self.suite.arms[arm].items()}  # fmt: skip
        return {**dict(self.overrides), **own, "run.seed": str(seed)}

    def config_of(self, arm: str, seed: int) -> RunConfig:
        file = Path(self.suite.training)
        return _read_config(
            file, file.stat().st_mtime_ns if file.is_file() else 0, tuple(self.settings_of(arm, seed).items())
        )

    def training_jobs(self) -> Iterator[Job]:
        """One seed after the other, so that an early end leaves complete comparisons."""
        for seed in self.suite.seeds:
            for arm in dict.fromkeys(map(self.first_like, self.arms)):
                yield self._training_job(arm, seed)

    def _training_job(self, arm: str, seed: int) -> Job:
        run, config = self.run_of(arm, seed), self.config_of(arm, seed)

        def command() -> list[str]:
            fields = [f"--{name}={value}" for name, value in self.settings_of(arm, seed).items()]
            line = [sys.executable, "-m", "memopd.cli", "train", self.suite.training, "--output", str(run), *fields]
            return [*line, "--resume"] if run.is_dir() else line

        def finished() -> bool:
            made = "adapter/adapter_config.json" if config.lora.rank else "model/config.json"
            if not (run / made).is_file() and not self._is_evaluated(arm, seed):
                return False
            if from_tables(json.loads((run / "config.json").read_text()), str(run)) != config:
                raise ValueError(f"{run}: was trained with other settings; remove it, or choose another --work")
            return True

        def progress() -> str:
            lines = read_metrics(run)
            return f"{lines[-1]['step'] + 1}/{config.optimise.steps}" if lines else ""

        log = self.folder / "logs" / f"train-{run.name}.log"
        guide = "" if config.teacher.state == "none" else config.model.teacher_adapter
        needs = self.needs_of([config.model.adapter, guide])
        return Job(f"train:{run.name}", command, finished, log, progress=progress, needs=needs)

    def _is_evaluated(self, arm: str, seed: int) -> bool:
        """Whether its settings, all metrics and all evaluations exist, so that nobody needs the weights.

        A run that was ended early still has checkpoints; then the evaluations are of an earlier run.
        """
        run, steps = self.run_of(arm, seed), self.config_of(arm, seed).optimise.steps
        if not (run / "config.json").is_file() or (run / "checkpoints").exists():
            return False
        if [line["step"] for line in read_metrics(run)[-1:]] != [steps - 1]:
            return False
        ways = (self, *map(self.under, self.suite.conventions))
        plans = [plan for work in ways for name, plan in work.plans() if name == f"{arm}-{seed}"]
        parts = [(plan, part) for plan in plans for part in plan.parts]
        return bool(parts) and all(is_made(plan, part) for plan, part in parts)

    # ---- evaluation --------------------------------------------------------------------------------------------

    def result_of(self, system: str, seed: int, k: int, data: str = "") -> Path:
        how = "-".join(filter(None, (self.split, self.convention)))
        name = self.first_like(system) if system in self.suite.arms else re.sub("[:/]", "-", system)
        what = "-".join(filter(None, (name, str(seed), data, f"q{k}")))
        return self.folder / "evaluations" / how / f"{what}.json"

    def tasks_of(self, data: str, k: int) -> str:
        return self.suite.evaluation.tasks.format(split=self.split, data=data, k=k)

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """One process per model and seed, which loads the model once for all data sets, horizons and rules."""
        base = load_config(self.suite.training, dict(self.overrides))
        fixed = {"student": (base.model.student, base.model.adapter),
                 "teacher": (base.model.teacher, base.model.teacher_adapter)}  # fmt: skip
        for who, (model, adapter) in fixed.items():
            of_model = [(s, k) for s, k in self.wanted if self.suite.who(s) == who]
            for seed in sorted({seed for s, _ in of_model for seed in self.suite.seeds_of(s)}):
                of_seed = [(s, k) for s, k in of_model if seed in self.suite.seeds_of(s)]
                parts = [(s, seed, k, s.partition("-")[2]) for s, k in of_seed]
                yield f"{who}-{seed}", self._plan(model, adapter, parts)
        for seed in self.suite.seeds:
            for arm in dict.fromkeys(map(self.first_like, self.arms)):
                horizons = {k: None for s, k in self.wanted if s in self.arms and self.first_like(s) == arm}
                parts = [(arm, seed, k, base.tasks.memory) for k in horizons]
                run, config = self.run_of(arm, seed), self.config_of(arm, seed)
                trained = (config.model.student, str(run / "adapter")) if config.lora.rank else (str(run / "model"), "")
                yield f"{arm}-{seed}", self._plan(*trained, parts)

    def _plan(self, model: str, adapter: str, parts: Sequence[tuple[str, int, int, str]]) -> Plan:
        made = [
            Part(s, seed, k, rule, self.tasks_of(data, k), str(self.result_of(s, seed, k, data)),
                 self.suite.concurrent, data)
            for s, seed, k, rule in parts for data in self.data
        ]  # fmt: skip
        return Plan(model, tuple(made), self.suite.evaluation, adapter)

    def evaluation_jobs(self) -> Iterator[Job]:
        """Each waits for its training. If that does not finish, this is reported when results are collected."""
        for name, plan in self.plans():
            yield self._evaluation_job(name, plan)
        for convention in self.suite.conventions:
            yield from self.under(convention).evaluation_jobs()

    def _evaluation_job(self, name: str, plan: Plan) -> Job:
        how = "-".join(filter(None, (self.split, self.convention)))
        file = self.folder / "logs" / f"evaluate-{how}-{name}.plan.json"

        def command() -> Sequence[str]:
            with whole(file) as partial:
                partial.write_text(plan.as_json())
            return [sys.executable, "-m", "paper.evaluation", str(file)]

        return Job(
            f"evaluate:{name}" + (f":{self.convention}" if self.convention else ""),
            command,
            lambda: all(is_made(plan, part) for part in plan.parts),
            self.folder / "logs" / f"evaluate-{how}-{name}.log",
            ready=lambda: plan.exists,
            after=f"train:{name}",
            needs=self.needs_of([plan.adapter]),
            progress=lambda: f"{sum(Path(part.output).is_file() for part in plan.parts)}/{len(plan.parts)}",
        )

    def jobs(self) -> list[Job]:
        """All of them, one seed after the other, so that an early end leaves complete comparisons."""
        seeds = [replace(self, suite=replace(self.suite, seeds=(seed,))) for seed in self.suite.seeds]
        ordered = [job for one in seeds for job in (*one.training_jobs(), *one.evaluation_jobs())]
        # Models that are not trained here are sampled with seed 0, also if that is not a seed of the arms.
        made = {job.name: job for job in (*ordered, *self.evaluation_jobs())}
        needed = {name for job in made.values() if job.needs and not job.finished() for name in job.needs}
        return [*(job for job in self.starting_jobs() if job.name in needed), *made.values()]


@lru_cache
def _read_config(training: Path, _written: int, settings: tuple[tuple[str, str], ...]) -> RunConfig:
    """Read once, because every name of a run and of a result asks for it."""
    return load_config(training, dict(settings))


def make(work: Work, only: Sequence[str] = (), until: float | None = None) -> Made:
    """Train and evaluate everything, or `only` the jobs of these names. `until`: see `run_jobs`."""
    jobs = work.jobs()
    names = [job.name for job in jobs]
    if unknown := sorted(set(only) - set(names)):
        raise ValueError(f"--only: unknown job {unknown[0]!r}: choose from {', '.join(names)}")
    with locked(work.folder):
        reuse(work)
        return run_jobs([job for job in jobs if not only or job.name in only], work.suite.concurrent, until)


def reuse(work: Work) -> None:
    """Take over finished runs that have an arm's settings under another name: those that chose them on dev."""
    configs = {}
    for file in sorted(work.folder.glob("q2/*/adapter/adapter_config.json")):
        run = file.parent.parent
        with suppress(ValueError, OSError):  # a run of another version is no run of ours
            configs[run] = from_tables(read_object(run / "config.json"), str(run))
    for seed in work.suite.seeds:
        for arm in work.arms:
            run, config = work.run_of(arm, seed), work.config_of(arm, seed)
            same = next((other for other in configs if configs[other] == config), None)
            if same is not None and not run.exists():
                with whole_folder(run) as partial:
                    for name in ("config.json", "metrics.jsonl"):
                        shutil.copy2(same / name, partial / name)
                    shutil.copytree(same / "adapter", partial / "adapter")
                log.info("%s: has the settings of %s, which is finished, and is a copy of it", run, same.name)


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
