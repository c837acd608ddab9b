"""What the experiments' TOML files say. No torch: `--help` must not wait for it.

suite.toml      the training runs and evaluations that main, single and control share
training.toml   the settings of `memopd train` that all arms have in common
NAME.toml       what one experiment shows, the paper's figures, and why ours differ
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

ARMS = {"ppo": "none", "persistent": "persistent", "memopd": "aligned"}  # the teacher's states
FIXED = ("student", "teacher")  # systems that are not trained here


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How every system is measured. Files of results that were made otherwise are made again."""

    tasks: str = "runs/world/tasks/{split}-q{k}.parquet"
    index: str = "runs/world/index"
    limit: int = 0  # tasks of a horizon; 0: all
    samples: int = 1  # episodes of a task and seed: their mean counts
    temperature: float = 1.0
    max_tokens: int = 128
    max_context: int = 8192
    batch: int = 256  # trajectories at once
    dtype: str = "float32"
    grading: str = "squad"


@dataclass(frozen=True, slots=True)
class Suite:
    training: str = "paper/configs/training.toml"
    arms: tuple[str, ...] = tuple(ARMS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    repeated: tuple[str, ...] = ()  # systems that are not trained here but sampled with every seed, as the arms are
    concurrent: int = 1  # processes; several may share a GPU
    evaluation: Evaluation = field(default_factory=Evaluation)

    def seeds_of(self, system: str) -> tuple[int, ...]:
        return self.seeds if system in ARMS or system in self.repeated else (0,)


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's table, as it stands there."""

    caption: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str | int | float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """One of the experiments that read the suite: main, single, control."""

    title: str
    suite: str = "paper/configs/suite.toml"
    horizons: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = ()  # the table's rows: an arm; or student-RULE, teacher-RULE as they were before
    compare: tuple[tuple[str, str], ...] = ()  # better, worse
    paper: Paper = field(default_factory=Paper)
    differs: str = ""  # why ours differ, written by hand


@dataclass(frozen=True, slots=True)
class Recorded:
    """One of the experiments on recorded trajectories: state, rules, corruption, domain, packing."""

    title: str
    model: str = "models/student"
    teacher: str = ""
    tasks: tuple[str, ...] = ("runs/world/tasks/test-q2.parquet",)
    index: str = "runs/world/index"
    rules: tuple[str, ...] = ("mem1",)
    trajectories: int = 64  # of each rule
    temperature: float = 1.0
    max_tokens: int = 128
    max_context: int = 4096
    batch: int = 64
    seed: int = 0
    dtype: str = "float32"
    shapes: tuple[str, ...] = ()  # packing alone: of `python -m benchmarks actor`
    multiples: tuple[int, ...] = ()
    repeats: int = 5
    measured: tuple[str, ...] = ()  # results of `python -m benchmarks actor --json` to show beside
    paper: Paper = field(default_factory=Paper)
    differs: str = ""


T = TypeVar("T", Suite, Shown, Recorded)


def load(kind: type[T], path: Path) -> T:
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; --config names another") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    made: T = _build(kind, table, str(path))
    if isinstance(made, Suite):
        _check(made, str(path))
    if isinstance(made, Shown):
        for system in made.systems:
            if system not in ARMS and system.partition("-")[0] not in FIXED:
                known = ", ".join([*ARMS, *(f"{who}-RULE" for who in FIXED)])
                raise ValueError(f"{path}: unknown system {system!r}: choose from {known}")
    return made


def chosen(suite: Suite, arms: tuple[str, ...] | None, seeds: tuple[int, ...] | None) -> Suite:
    """Only some of the runs, for probes."""
    suite = replace(suite, arms=suite.arms if arms is None else arms, seeds=suite.seeds if seeds is None else seeds)
    _check(suite, "--arms and --seeds")
    return suite


def _check(suite: Suite, where: str) -> None:
    for arm in suite.arms:
        if arm not in ARMS:
            raise ValueError(f"{where}: unknown arm {arm!r}: choose from {', '.join(ARMS)}")
    if suite.concurrent < 1:
        raise ValueError(f"{where}: concurrent must be 1 or more, got {suite.concurrent}")
    if suite.evaluation.samples < 1:
        raise ValueError(f"{where}: evaluation.samples must be 1 or more, got {suite.evaluation.samples}")


def _build(kind: Any, table: dict[str, Any], where: str) -> Any:
    kinds = get_type_hints(kind)
    for key in table:
        if key not in kinds:
            raise ValueError(f"{where}: no such setting: {key}; there are {', '.join(kinds)}")
    if "title" in kinds and "title" not in table:
        raise ValueError(f"{where}: title is missing")
    return kind(**{key: _typed(kinds[key], value, f"{where}: {key}") for key, value in table.items()})


def _typed(kind: Any, value: Any, where: str) -> Any:
    if hasattr(kind, "__dataclass_fields__") and isinstance(value, dict):
        return _build(kind, value, where)
    if get_origin(kind) is tuple and isinstance(value, list):
        item = get_args(kind)
        kinds = item[:1] * len(value) if item[-1] is Ellipsis else item
        if len(kinds) == len(value):
            return tuple(_typed(k, v, where) for k, v in zip(kinds, value, strict=True))
    elif get_origin(kind) is UnionType:
        if type(value) in get_args(kind):
            return value
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{where}: must be of type {getattr(kind, '__name__', kind)}, got {value!r}")
