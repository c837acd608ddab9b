"""The settings of the experiments: one frozen dataclass per kind of TOML file.

They are in paper/world (the embedded world) and paper/real (pretrained models, real questions):

suite.toml      the training runs and evaluations that main, single and control share
training.toml   the settings of `memopd train` that all arms have in common
NAME.toml       one experiment: its settings, the paper's numbers, and the reasons why ours differ

This module must not import torch: `--help` must not wait for it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from memopd import schema
from memopd.tasks.grading import Grading

FIXED = ("student", "teacher")  # who is not trained here; student-mem1 is the student under this memory rule

_CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Evaluation:
    """How every system is measured. Results that were measured with other settings are measured again."""

    tasks: str = "runs/world/tasks/{split}-q{k}.parquet"  # with {data} if there are several data sets
    data: tuple[str, ...] = ()  # the data sets, which are shown each and together
    index: str = "runs/world/index"
    limit: int = 0  # tasks per horizon and data set; 0: all
    samples: int = Field(default=1, ge=1)  # episodes per task and seed, of which we take the mean
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 128
    max_context: int = 8192
    batch: int = 256  # trajectories that run at once
    dtype: str = "float32"
    grading: Grading = "squad"


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Convention:
    """Another way to sample in the evaluation, for some of the seeds."""

    temperature: float
    top_p: float = 1.0
    seeds: tuple[int, ...] = (0,)


Value = str | int | float | bool


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Suite:
    training: str = "paper/world/training.toml"
    arms: dict[str, dict[str, Value]] = field(default_factory=dict)  # name -> its own settings of `memopd train`
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    repeated: tuple[str, ...] = ()  # systems that are not trained here, but sampled with every seed like the arms
    concurrent: int = Field(default=1, ge=1)  # processes; several may share a GPU
    evaluation: Evaluation = field(default_factory=Evaluation)
    conventions: dict[str, Convention] = field(default_factory=dict)  # besides that of `evaluation`
    starts: dict[str, str] = field(default_factory=dict)  # run of `memopd sft` that arms need -> its configuration

    def seeds_of(self, system: str) -> tuple[int, ...]:
        return self.seeds if system in self.arms or system in self.repeated else (0,)

    def who(self, system: str) -> str:
        """Of a system that is not trained here: student or teacher. An arm has no such name."""
        return "" if system in self.arms else system.partition("-")[0]

    def under(self, convention: str) -> Suite:
        """The same suite with another way to sample."""
        how = self.conventions[convention]
        sampled = replace(self.evaluation, temperature=how.temperature, top_p=how.top_p)
        seeds = tuple(seed for seed in self.seeds if seed in how.seeds)
        return replace(self, seeds=seeds, evaluation=sampled, conventions={})


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Paper:
    """A table, as printed in the paper."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str | int | float, ...], ...] = ()


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Choice:
    """A setting whose value is chosen on dev."""

    setting: str  # of `memopd train`, for example optimise.lr
    arms: tuple[str, ...]  # each with its own value


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Choices(Suite):
    """The runs that choose settings on dev, and the order of the choices."""

    title: str = ""
    horizon: int = 2
    beside: tuple[str, ...] = ()  # systems before training that are shown for comparison
    choices: tuple[Choice, ...] = ()
    paper: Paper = field(default_factory=Paper)
    differs: str = ""


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Shown:
    """An experiment that shows results of the suite: main, single, control."""

    title: str
    suite: str = "paper/world/suite.toml"
    horizons: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = ()  # the rows of the table: arms, or student-RULE and teacher-RULE before training
    compare: tuple[tuple[str, str], ...] = ()  # pairs (better, worse)
    claims: tuple[tuple[str, str], ...] = ()  # those of the pairs whose order the plan claims, in F1, on every horizon
    grows: tuple[tuple[str, str], ...] = ()  # the plan claims that this advantage grows with the horizon
    shorter: tuple[tuple[str, str], ...] = ()  # the plan claims that the first one's peak is lower on the longest tasks
    paper: Paper = field(default_factory=Paper)
    differs: str = ""  # the reasons why our numbers differ


@dataclass(frozen=True, slots=True, config=_CONFIG)
class Recorded:
    """An experiment on recorded trajectories: state, rules, corruption, domain, packing."""

    title: str
    model: str = "models/student"
    adapter: str = ""  # of the model
    teacher: str = ""
    teacher_adapter: str = ""
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


T = TypeVar("T", Suite, Choices, Shown, Recorded)


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
    return made


def check_systems(shown: Shown, suite: Suite, source: str) -> None:
    """Raise an error if an experiment shows a system that its suite does not have."""
    for system in (*shown.systems, *(s for pairs in _pairs(shown).values() for pair in pairs for s in pair)):
        if system not in suite.arms and system.partition("-")[0] not in FIXED:
            known = ", ".join([*suite.arms, *(f"{who}-RULE" for who in FIXED)])
            raise ValueError(f"{source}: unknown system {system!r}: choose from {known}")


def check_choices(choices: Choices, source: str) -> None:
    """Raise an error if an arm has no value for the setting that it is to choose."""
    for choice in choices.choices:
        for arm in choice.arms:
            if choice.setting not in choices.arms.get(arm, {}):
                raise ValueError(f"{source}: arm {arm!r} must have a value for {choice.setting}")
        values = [choices.arms[arm][choice.setting] for arm in choice.arms]
        if len(set(values)) < len(values):
            raise ValueError(f"{source}: two arms have the same value for {choice.setting}")


def chosen(suite: Suite, arms: tuple[str, ...] | None, seeds: tuple[int, ...] | None) -> Suite:
    """Keep only some of the runs, for a quick test of settings."""
    for arm in arms or ():
        if arm not in suite.arms:
            raise ValueError(f"--arms: unknown arm {arm!r}: choose from {', '.join(suite.arms)}")
    kept = suite.arms if arms is None else {arm: suite.arms[arm] for arm in arms}
    return replace(suite, arms=kept, seeds=suite.seeds if seeds is None else seeds)


def without(shown: Shown, arms: Collection[str]) -> Shown:
    """An experiment without these arms, and without the comparisons that need them."""

    def kept(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple(pair for pair in pairs if not set(pair) & set(arms))

    systems = tuple(system for system in shown.systems if system not in arms)
    pairs: Any = {name: kept(of_name) for name, of_name in _pairs(shown).items()}
    return replace(shown, systems=systems, **pairs)


def _pairs(shown: Shown) -> dict[str, tuple[tuple[str, str], ...]]:
    return {name: getattr(shown, name) for name in ("compare", "claims", "grows", "shorter")}


def _line(error: ValidationError) -> str:
    """Describe the first of pydantic's errors in one line."""
    first = error.errors(include_url=False)[0]
    place = schema.place(first["loc"])
    return f"no such setting: {place}" if first["type"] in schema.UNKNOWN else f"{place}: {schema.message(first)}"
