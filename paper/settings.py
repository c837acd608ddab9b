"""The settings of the experiments: one frozen dataclass per kind of TOML file.

suite.toml      the training runs and evaluations that main, single and control share
training.toml   the settings of `memopd train` that all arms have in common
NAME.toml       one experiment: its settings, the paper's numbers, and the reasons why ours differ

This module must not import torch: `--help` must not wait for it.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from memopd import schema
from memopd.tasks.grading import Grading

ARMS = {"ppo": "none", "persistent": "persistent", "memopd": "aligned"}  # arm -> teacher.state
FIXED = ("student", "teacher")  # systems that are not trained here

_CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Evaluation:
    """How every system is measured. Results that were measured with other settings are measured again."""

    tasks: str = "runs/world/tasks/{split}-q{k}.parquet"
    index: str = "runs/world/index"
    limit: int = 0  # tasks per horizon; 0: all
    samples: int = Field(default=1, ge=1)  # episodes per task and seed, of which we take the mean
    temperature: float = 1.0
    max_tokens: int = 128
    max_context: int = 8192
    batch: int = 256  # trajectories that run at once
    dtype: str = "float32"
    grading: Grading = "squad"


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Suite:
    training: str = "paper/configs/training.toml"
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    repeated: tuple[str, ...] = ()  # systems that are not trained here, but sampled with every seed like the arms
    concurrent: int = Field(default=1, ge=1)  # processes; several may share a GPU
    evaluation: Evaluation = field(default_factory=Evaluation)

    def seeds_of(self, system: str) -> tuple[int, ...]:
        return self.seeds if system in ARMS or system in self.repeated else (0,)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Paper:
    """A table, as printed in the paper."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str | int | float, ...], ...] = ()


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Shown:
    """An experiment that shows results of the suite: main, single, control."""

    title: str
    suite: str = "paper/configs/suite.toml"
    horizons: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = ()  # the rows of the table: arms, or student-RULE and teacher-RULE before training
    compare: tuple[tuple[str, str], ...] = ()  # pairs (better, worse)
    paper: Paper = field(default_factory=Paper)
    differs: str = ""  # the reasons why our numbers differ


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Recorded:
    """An experiment on recorded trajectories: state, rules, corruption, domain, packing."""

    title: str
    model: str = "models/student"
    teacher: str = ""
    tasks: tuple[str, ...] = ("runs/world/tasks/test-q2.parquet",)
    index: str = "runs/world/index"
    rules: tuple[str, ...] = ("mem1",)
    trajectories: int = 64  # per rule
    temperature: float = 1.0
    max_tokens: int = 128
    max_context: int = 4096
    batch: int = 64
    seed: int = 0
    dtype: str = "float32"
    shapes: tuple[str, ...] = ()  # only for packing: shapes of `python -m benchmarks actor`
    multiples: tuple[int, ...] = ()
    repeats: int = 5
    measured: tuple[str, ...] = ()  # files of results of `python -m benchmarks actor --json` that are shown as well
    paper: Paper = field(default_factory=Paper)
    differs: str = ""


T = TypeVar("T", Suite, Shown, Recorded)


def load(kind: type[T], path: Path) -> T:
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; name another with --config") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    try:  # as JSON, in which strict tuples accept lists
        made: T = TypeAdapter(kind).validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ValueError(f"{path}: {_line(error)}") from None
    if isinstance(made, Suite):
        _check_arms(made.arms, str(path))
    if isinstance(made, Shown):
        for system in made.systems:
            if system not in ARMS and system.partition("-")[0] not in FIXED:
                known = ", ".join([*ARMS, *(f"{who}-RULE" for who in FIXED)])
                raise ValueError(f"{path}: unknown system {system!r}: choose from {known}")
    return made


def chosen(suite: Suite, arms: tuple[str, ...] | None, seeds: tuple[int, ...] | None) -> Suite:
    """Keep only some of the runs, for a quick test of settings."""
    _check_arms(arms or (), "--arms")
    return replace(suite, arms=suite.arms if arms is None else arms, seeds=suite.seeds if seeds is None else seeds)


def _check_arms(arms: tuple[str, ...], source: str) -> None:
    for arm in arms:
        if arm not in ARMS:
            raise ValueError(f"{source}: unknown arm {arm!r}: choose from {', '.join(ARMS)}")


def _line(error: ValidationError) -> str:
    """Describe the first of pydantic's errors in one line."""
    first = error.errors(include_url=False)[0]
    place = schema.place(first["loc"])
    return f"no such setting: {place}" if first["type"] in schema.UNKNOWN else f"{place}: {schema.message(first)}"
