"""One frozen dataclass per stage; TOML in, resolved JSON out. No torch: `--help` must not wait for it.

[model]     who learns, who teaches          [tasks]     what is asked, what can be searched
[sampling]  how episodes are sampled         [optimise]  PPO's settings
[teacher]   the distillation term            [sft]       supervised training before it
[run]       seed, checkpoints, checks
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16", "float64"),
    "tasks.grading": ("squad", "mem1"),
    "optimise.schedule": ("constant", "cosine"),
    "teacher.state": ("aligned", "persistent", "none"),
    "teacher.mask": ("all", "think", "action"),
}

ABOVE_ZERO = {
    *("tasks.topk", "tasks.max_context", "sampling.temperature", "sampling.max_tokens", "sampling.batch"),
    *(f"optimise.{f}" for f in ("steps", "tasks", "samples", "epochs", "mini_batch", "budget", "max_grad_norm")),
    *("sft.tokens", "sft.batch", "run.save_every", "run.keep", "run.dev_tasks"),
}
SHARES = {
    *(f"optimise.{f}" for f in ("gamma", "gae_lambda", "warmup", "critic_warmup", "clip")),
    "sft.short",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    student: str = ""  # π_θ at the start, and π_ref: a folder or a hub name
    teacher: str = ""  # π_T, frozen; empty only with teacher.state = "none"
    dtype: str = "float32"  # of the passes; master weights stay float32 under bfloat16; float64 is for checks
    attention: str = "auto"  # or dense, flex, cascade, or package.module:Class
    checkpointing: bool = False  # recompute activations in the backward pass


@dataclass(frozen=True, slots=True)
class TasksConfig:
    train: str = ""  # Parquet of tasks
    dev: str = ""  # empty: no evaluation while training
    index: str = ""  # a folder, or the URL of a retrieval service
    environment: str = "search"  # or package.module:Class
    memory: str = "mem1"  # the context-update rule U, or package.module:Class
    topk: int = 3  # documents a search
    max_context: int = 4096  # tokens of a call's prompt; an episode that needs more ends
    reward: str = "em"  # or f1, or package.module:function
    grading: str = "squad"


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    servers: tuple[str, ...] = ()  # URLs of vLLM servers; none: the model samples in this process
    temperature: float = 1.0
    max_tokens: int = 1000  # a response
    batch: int = 64  # episodes at once
    replay: str = ""  # a store of recorded episodes to train on instead of sampling


@dataclass(frozen=True, slots=True)
class OptimiseConfig:
    steps: int = 500
    tasks: int = 128  # a step
    samples: int = 1  # episodes a task
    algorithm: str = "ppo"  # with a critic; or grpo, rloo, gspo, which need none; or package.module:Class
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten: bool = True  # verl does, the paper is silent
    epochs: int = 1
    mini_batch: int = 64  # episodes an optimiser step
    micro_batch: int = 0  # episodes whose calls may share packs; 0: the whole mini-batch
    budget: int = 16384  # rows a pack
    share: bool = True  # False: every call gets rows of its own, for comparison
    clip: float = 0.2
    clip_high: float = 0.0  # the upper clip, where it is another (DAPO: 0.28); 0: as clip
    value_clip: float = 0.5
    entropy: float = 0.001  # α
    reference: float = 0.001  # β
    lr: float = 1e-6
    warmup: float = 0.05  # share of the steps
    critic_lr: float = 1e-5
    critic_warmup: float = 0.015
    schedule: str = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    state: str = "aligned"  # MemOPD; persistent: the paper's control; none: PPO
    mask: str = "all"  # m^T: all sampled tokens, the <think> part, or the action after it
    weight: float = 0.02  # λ
    divergence: str = "reverse_kl"  # or forward_kl, jsd:0.5 (its β), top_k:64, or package.module:function


@dataclass(frozen=True, slots=True)
class SftConfig:
    start: str = ""  # a model folder; or a config.json, for random weights
    tokenizer: str = ""  # where it does not lie with the model
    episodes: tuple[str, ...] = ()  # stores of interactions to imitate
    dev: tuple[str, ...] = ()
    keep: tuple[str, ...] = ("correct", "valid")  # the paper's filter
    tokens: int = 50_000_000  # sampled and read, in all
    batch: int = 24_576  # tokens an optimiser step
    lr: float = 8e-4  # after a short warm-up; falls to a tenth by a cosine
    short: float = 0.6  # for this share of the run only episodes of at most short_k questions
    short_k: int = 2


@dataclass(frozen=True, slots=True)
class RunSettings:
    seed: int = 0
    save_every: int = 10  # steps
    keep: int = 2  # checkpoints
    check_every: int = 50  # steps between equivalence checks; the first batch is always checked
    dev_every: int = 0  # steps; 0: never
    dev_tasks: int = 128


@dataclass(frozen=True, slots=True)
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    optimise: OptimiseConfig = field(default_factory=OptimiseConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    run: RunSettings = field(default_factory=RunSettings)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


SECTIONS = {f.name: f.default_factory for f in fields(RunConfig)}


def load_config(path: str | Path, overrides: dict[str, str] | None = None) -> RunConfig:
    """A TOML file, then `{"optimise.lr": "1e-5"}` from the command line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; configs/ has examples")
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    config = from_tables(table, str(path))
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if section not in SECTIONS:
            raise ValueError(f"--{name}: unknown section {section!r}: choose from {', '.join(SECTIONS)}")
        part = getattr(config, section)
        value = _parse(_kind(part, key, f"--{name}"), text, f"--{name}")
        config = replace(config, **{section: replace(part, **{key: value})})
    check(config)
    return config


def from_tables(table: dict[str, Any], source: str) -> RunConfig:
    """Also reads back what `as_json` wrote."""
    parts = {}
    for section, values in table.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise ValueError(f"{source}: unknown section [{section}]: choose from {', '.join(SECTIONS)}")
        default = SECTIONS[section]()  # type: ignore[operator]
        typed = {
            key: _typed(_kind(default, key, f"{source}: {section}.{key}"), value, f"{source}: {section}.{key}")
            for key, value in values.items()
        }
        parts[section] = replace(default, **typed)
    return RunConfig(**parts)


def check(config: RunConfig) -> None:
    for name, choices in CHOICES.items():
        section, key = name.split(".")
        if (value := getattr(getattr(config, section), key)) not in choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")
    for section in SECTIONS:
        part = getattr(config, section)
        for f in fields(part):
            value, name = getattr(part, f.name), f"{section}.{f.name}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                if not math.isfinite(value):
                    raise ValueError(f"{name}: must be a finite number, got {value}")
                if value < 0:
                    raise ValueError(f"{name}: must not be negative, got {value}")
                if name in ABOVE_ZERO and value == 0:
                    raise ValueError(f"{name}: must be above 0")
                if name in SHARES and value > 1:
                    raise ValueError(f"{name}: is a share, at most 1, got {value}")
    grouped = config.optimise.algorithm in ("grpo", "rloo", "gspo")
    if grouped and config.optimise.samples < 2 and not config.sampling.replay:
        raise ValueError(
            f'optimise.algorithm = "{config.optimise.algorithm}" compares the episodes of a task: optimise.samples must be 2 up'
        )


def _kind(part: Any, key: str, where: str) -> Any:
    kinds = get_type_hints(type(part))
    if key not in kinds:
        raise ValueError(f"{where}: no such setting; there are {', '.join(kinds)}")
    return kinds[key]


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value from TOML or JSON as its field's type."""
    if kind == tuple[str, ...]:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
            return tuple(value)
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{where}: must be {_NAMES[kind]}, got {value!r}")


def _parse(kind: Any, text: str, where: str) -> Any:
    """A value from the command line."""
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{where}: must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{where}: must be {_NAMES[kind]}, got {text!r}") from None


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "a list of text",
}
