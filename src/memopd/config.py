"""A run's settings: one frozen dataclass per section of the TOML file, with types, bounds and choices at each field.

[model]     who learns, who teaches          [tasks]     what is asked, what can be searched
[sampling]  how episodes are sampled         [optimise]  the algorithm's settings
[teacher]   the distillation term            [sft]       supervised training before it
[run]       seed, checkpoints, checks

TOML in, resolved JSON out; `memopd config --schema` prints the JSON schema for editors. The classes are pydantic's, so
`dataclasses.replace` checks the new values too. This module must not import torch: `--help` must not wait for it.
"""

from __future__ import annotations

import json
import logging
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.dataclasses import dataclass

from memopd import schema

log = logging.getLogger("memopd")


def _as_tuple(value: Any) -> Any:
    """One string stands for a list of one; strict tuples take no list."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


# Strict, so that true is no number and "1" is none either; TOML and JSON have types of their own.
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Number = Annotated[float, Field(strict=True, ge=0)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
_ANY_TEXT = {"type": "string"}
Texts = Annotated[
    tuple[Text, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [_ANY_TEXT, {"type": "array", "items": _ANY_TEXT}]}),
]


_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, config=_CONFIG)
class ModelConfig:
    """Who learns, who teaches."""

    student: Text = Field(default="", description="π_θ at the start, and π_ref: a folder or a hub name")
    teacher: Text = Field(default="", description='π_T, frozen; empty only with teacher.state = "none"')
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="of the passes; master weights stay float32 under bfloat16; float64 is for checks",
    )
    attention: Text = Field(default="auto", description="or dense, flex, cascade, or package.module:Class")
    checkpointing: Flag = Field(default=False, description="recompute activations in the backward pass")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class TasksConfig:
    """What is asked, what can be searched."""

    train: Text = Field(default="", description="Parquet file of tasks")
    dev: Text = Field(default="", description="Parquet file of tasks; empty: no evaluation while training")
    index: Text = Field(default="", description="a folder, or the URL of a retrieval service")
    environment: Text = Field(default="search", description="or package.module:Class")
    memory: Text = Field(default="mem1", description="the context-update rule U, or package.module:Class")
    topk: Positive = Field(default=3, description="documents per search")
    max_context: Positive = Field(
        default=4096, description="tokens of a call's prompt; an episode that needs more ends"
    )
    reward: Text = Field(default="em", description="or f1, or package.module:function")
    grading: Literal["squad", "mem1"] = Field(
        default="squad", description="how answers are normalised before they are compared"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SamplingConfig:
    """How episodes are sampled."""

    servers: Texts = Field(default=(), description="URLs of vLLM servers; none: the model samples in this process")
    temperature: PositiveNumber = Field(default=1.0, description="of the distribution that tokens are drawn from")
    max_tokens: Positive = Field(default=1000, description="of one response")
    batch: Positive = Field(default=64, description="episodes at once")
    replay: Text = Field(default="", description="a store of recorded episodes to train on instead of sampling")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class OptimiseConfig:
    """The algorithm's settings."""

    steps: Positive = Field(default=500, description="updates in all")
    tasks: Positive = Field(default=128, description="per step")
    samples: Positive = Field(default=1, description="episodes per task")
    algorithm: Text = Field(
        default="ppo", description="ppo has a critic; grpo, rloo and gspo need none; or package.module:Class"
    )
    gamma: Share = Field(default=1.0, description="discount γ")
    gae_lambda: Share = Field(default=1.0, description="λ of generalised advantage estimation")
    whiten: Flag = Field(
        default=True, description="scale advantages to mean 0, deviation 1; verl does, the paper is silent"
    )
    epochs: Positive = Field(default=1, description="passes over the episodes of a step")
    mini_batch: Positive = Field(default=64, description="episodes per optimiser step")
    micro_batch: Whole = Field(default=0, description="episodes whose calls may share packs; 0: the whole mini-batch")
    budget: Positive = Field(default=16384, description="rows per pack")
    share: Flag = Field(default=True, description="false: every call gets rows of its own, for comparison")
    clip: Share = Field(default=0.2, description="ε of the policy's clip")
    clip_high: Number = Field(default=0.0, description="the upper clip, where it is another (DAPO: 0.28); 0: as clip")
    value_clip: Number = Field(default=0.5, description="ε of the critic's clip")
    entropy: Number = Field(default=0.001, description="α, the weight of the entropy bonus")
    reference: Number = Field(default=0.001, description="β, the weight of the divergence from the reference policy")
    lr: Number = Field(default=1e-6, description="learning rate")
    warmup: Share = Field(default=0.05, description="share of the steps")
    critic_lr: Number = Field(default=1e-5, description="the critic's learning rate")
    critic_warmup: Share = Field(default=0.015, description="share of the steps")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="of the learning rates after warm-up"
    )
    weight_decay: Number = Field(default=0.0, description="AdamW's")
    max_grad_norm: PositiveNumber = Field(default=1.0, description="gradients are clipped to this norm")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class TeacherConfig:
    """The distillation term."""

    state: Literal["aligned", "persistent", "none"] = Field(
        default="aligned", description="aligned: MemOPD; persistent: the paper's control; none: no teacher"
    )
    mask: Literal["all", "think", "action"] = Field(
        default="all", description="m^T: all sampled tokens, the <think> part, or the action after it"
    )
    weight: Number = Field(default=0.02, description="λ")
    divergence: Text = Field(
        default="reverse_kl", description="or forward_kl, jsd:0.5 (its β), top_k:64, or package.module:function"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SftConfig:
    """Supervised training on recorded interactions."""

    start: Text = Field(default="", description="a model folder; or a config.json, for random weights")
    tokenizer: Text = Field(default="", description="its folder, where the model's folder has none")
    episodes: Texts = Field(default=(), description="stores of interactions to imitate")
    dev: Texts = Field(default=(), description="stores of interactions to measure on")
    keep: Texts = Field(
        default=("correct", "valid"), description="which interactions to imitate; the default is the paper's"
    )
    tokens: Positive = Field(default=50_000_000, description="sampled and read, in all")
    batch: Positive = Field(default=24_576, description="tokens per optimiser step")
    lr: Number = Field(default=8e-4, description="after a short warm-up; falls to a tenth by a cosine")
    short: Share = Field(
        default=0.6, description="for this share of the run only episodes of at most short_k questions"
    )
    short_k: Whole = Field(default=2, description="see short")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class RunSettings:
    """Seed, checkpoints, checks."""

    seed: Whole = Field(default=0, description="of everything that is drawn")
    save_every: Positive = Field(default=10, description="steps")
    keep: Positive = Field(default=2, description="checkpoints")
    check_every: Whole = Field(
        default=50, description="steps between equivalence checks; the first batch is always checked"
    )
    dev_every: Whole = Field(default=0, description="steps; 0: never")
    dev_tasks: Positive = Field(default=128, description="tasks of an evaluation while training")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class RunConfig:
    """The configuration of `memopd sft` and `memopd train`."""

    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    sampling: SamplingConfig = SamplingConfig()
    optimise: OptimiseConfig = OptimiseConfig()
    teacher: TeacherConfig = TeacherConfig()
    sft: SftConfig = SftConfig()
    run: RunSettings = RunSettings()

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


SECTIONS: dict[str, type[Any]] = get_type_hints(RunConfig)
_ADAPTER = TypeAdapter(RunConfig)


def load_config(path: str | Path, overrides: dict[str, str] | None = None) -> RunConfig:
    """A TOML file, then `{"optimise.lr": "1e-5"}` from the command line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; configs/ has examples")
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    sources = {}
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if section not in SECTIONS:
            raise ValueError(f"--{name}: unknown section {section!r}: choose from {', '.join(SECTIONS)}")
        if isinstance(values := table.setdefault(section, {}), dict):
            values[key] = _from_text(section, key, text)
        sources[section, key] = f"--{name}"
    old = table.get("optimise")
    if isinstance(old, dict) and "advantages" in old:
        log.info('%s: optimise.advantages is called optimise.algorithm now: "gae" is "ppo", "group" is "grpo"', path)
    return from_tables(table, str(path), sources)


def from_tables(table: dict[str, Any], source: str, sources: dict[tuple[str, str], str] | None = None) -> RunConfig:
    """The checked configuration of a TOML file's tables, or of what `as_json` wrote, by this version or an older one.

    Errors name the `source`, or the option that gave the value (`sources`).
    """
    for section, values in table.items():
        if section not in SECTIONS or not isinstance(values, dict):
            raise ValueError(f"{source}: unknown section [{section}]: choose from {', '.join(SECTIONS)}")
    try:
        return _ADAPTER.validate_python(_carried_over(table, source))
    except ValidationError as error:
        raise ValueError(_line(error, source, sources or {})) from None


def json_schema() -> dict[str, Any]:
    """For editors: every setting with its type, bounds, default and description."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_ADAPTER.json_schema()}


def _carried_over(table: dict[str, Any], source: str) -> dict[str, Any]:
    """Settings that older versions knew, under the names that they have now."""
    optimise = dict(table.get("optimise", {}))
    if "advantages" not in optimise:
        return table
    if "algorithm" in optimise:
        raise ValueError(f"{source}: optimise.advantages is the old name of optimise.algorithm: remove advantages")
    match optimise.pop("advantages"):
        case "gae":
            optimise["algorithm"] = "ppo"
        case "group":
            optimise["algorithm"] = "grpo"
        case other:
            raise ValueError(
                f"{source}: optimise.advantages: {other!r} is not one of gae, group; it is optimise.algorithm now"
            )
    return table | {"optimise": optimise}


def _line(error: ValidationError, source: str, sources: dict[tuple[str, str], str]) -> str:
    """The first of pydantic's errors as one line."""
    first = error.errors(include_url=False)[0]
    where = first["loc"]
    if not where:  # two settings that do not go together
        return f"{source}: {schema.message(first)}"
    section, key = str(where[0]), str(where[1])
    name = sources.get((section, key), f"{source}: {section}.{key}")
    if first["type"] in schema.UNKNOWN:
        return f"{name}: no such setting; there are {', '.join(f.name for f in fields(SECTIONS[section]))}"
    if len(where) > 2:
        return f"{name}: must be a list of strings, got {schema.short(first['input'])} in it"
    return f"{name}: {schema.message(first)}"


def _from_text(section: str, key: str, text: str) -> Any:
    """A value from the command line, as TOML would have it; text that does not fit is left for the field to refuse."""
    kind = get_type_hints(SECTIONS[section]).get(key)
    if kind == tuple[str, ...]:
        return [part for part in text.split(",") if part]
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text
