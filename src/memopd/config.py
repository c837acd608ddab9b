"""A run's settings: one frozen dataclass per section of the TOML file, with types, bounds and choices at each field.

[model]     the student and the teacher      [tasks]     the tasks, environment and memory rule
[sampling]  how episodes are sampled         [optimise]  the algorithm's settings
[teacher]   the distillation term            [sft]       supervised training before it
[lora]      adapters instead of all weights  [run]       seed, checkpoints, checks

Settings are read from TOML and recorded as JSON with all defaults; `memopd config --schema` prints the JSON schema for
editors. The classes are pydantic dataclasses, so `dataclasses.replace` checks the new values too. This module must not
import torch: `--help` must not wait for it.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.dataclasses import dataclass

from memopd import schema

log = logging.getLogger("memopd")


def _as_tuple(value: Any) -> Any:
    """Accept a single string as a list of one string, and turn lists into tuples, which strict fields require."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _no_dropout(value: float) -> float:
    if value:
        raise ValueError(
            f"must be 0, got {value}: packed calls share rows, which would share a mask, and PPO's ratios would "
            "compare two different masks"
        )
    return value


def _only_with_servers(value: int, info: ValidationInfo) -> int:
    """Check sampling.ahead against the other settings of its section."""
    if value and info.data.get("replay"):
        raise ValueError("must be 0 with sampling.replay: recorded episodes are not sampled")
    if value and not info.data.get("servers"):
        raise ValueError(
            "needs sampling.servers: in one process, sampling and training take turns on the same device and weights"
        )
    return value


# Fields are strict: true and "1" are not accepted as numbers, because TOML and JSON have their own types.
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
    """The student and the teacher."""

    student: Text = Field(
        default="", description="the initial policy π_θ, and the reference π_ref: a folder or a hub name"
    )
    teacher: Text = Field(
        default="",
        description='the frozen teacher π_T: a folder or a hub name; may be empty only with teacher.state = "none"',
    )
    adapter: Text = Field(
        default="",
        description="a folder with a LoRA adapter of the student (in sft: of sft.start) to start from; needs lora.rank",
    )
    teacher_adapter: Text = Field(default="", description="a folder with a LoRA adapter of the teacher")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="precision of the passes; under bfloat16 the master weights stay float32; float64 is for checks",
    )
    attention: Text = Field(
        default="auto", description="the attention kernel: auto, dense, flex, cascade, or package.module:Class"
    )
    checkpointing: Flag = Field(default=False, description="recompute activations in the backward pass")
    compiled: Flag = Field(
        default=True, description="on one GPU: compile the layers for training, a minute or two at the first start"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class TasksConfig:
    """The tasks, the environment, the memory rule and the reward."""

    train: Text = Field(default="", description="Parquet file of training tasks")
    dev: Text = Field(
        default="", description="Parquet file of tasks to evaluate on while training; empty: no evaluation"
    )
    index: Text = Field(default="", description="an index folder, or the URL of a retrieval service")
    environment: Text = Field(default="search", description="search, or package.module:Class")
    memory: Text = Field(
        default="mem1", description="the context-update rule U: mem1, full_response, ..., or package.module:Class"
    )
    topk: Positive = Field(default=3, description="documents per search")
    max_context: Positive = Field(
        default=4096, description="the most tokens per prompt; an episode that needs more ends"
    )
    reward: Text = Field(
        default="em", description="em, f1, em_partial (MEM1's in training), or package.module:function"
    )
    grading: Literal["squad", "mem1"] = Field(
        default="squad", description="how answers are normalised before they are compared"
    )
    turns: Whole = Field(default=0, description="the most turns per episode; 0: 2k + 2 for k questions")
    prompt: Text = Field(
        default="", description="a text file with the user turn, {questions} where the questions go; empty: our own"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SamplingConfig:
    """How episodes are sampled."""

    servers: Texts = Field(
        default=(), description="URLs of vLLM servers; if there are none, the training process samples"
    )
    temperature: PositiveNumber = Field(default=1.0, description="the sampling temperature")
    max_tokens: Positive = Field(default=1000, description="the most tokens per response")
    batch: Positive = Field(default=64, description="episodes that run at once")
    fused: Flag = Field(
        default=True, description="sampling in this process on a GPU: compile the layers, half a minute at the start"
    )
    replay: Text = Field(default="", description="a store of recorded episodes to train on instead of sampling")
    ahead: Annotated[Whole, AfterValidator(_only_with_servers)] = Field(
        default=0, description="with servers: batches to sample while others train, each at most so many updates stale"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class OptimiseConfig:
    """The algorithm's settings."""

    steps: Positive = Field(default=500, description="total number of training steps")
    tasks: Positive = Field(default=128, description="tasks per step")
    samples: Positive = Field(default=1, description="episodes per task")
    algorithm: Text = Field(
        default="ppo",
        description="ppo, which trains a critic; grpo, rloo or gspo, which need none; or package.module:Class",
    )
    gamma: Share = Field(default=1.0, description="discount γ")
    gae_lambda: Share = Field(default=1.0, description="λ of generalised advantage estimation")
    whiten: Flag = Field(
        default=True, description="scale advantages to mean 0 and deviation 1; verl does, the paper does not say"
    )
    epochs: Positive = Field(default=1, description="passes over the episodes of a step")
    mini_batch: Positive = Field(default=64, description="episodes per optimiser step")
    micro_batch: Whole = Field(default=0, description="episodes whose calls may share packs; 0: the whole mini-batch")
    budget: Positive = Field(default=16384, description="rows per pack")
    share: Flag = Field(
        default=True,
        description="share the rows of equal prefixes; false gives every call its own rows, for comparison",
    )
    clip: Share = Field(default=0.2, description="ε, the clip range of the policy's ratio")
    clip_high: Number = Field(
        default=0.0, description="the upper clip range if it differs (DAPO: 0.28); 0: the same as clip"
    )
    value_clip: Number = Field(default=0.5, description="ε, the clip range of the critic's values")
    entropy: Number = Field(default=0.001, description="α, the weight of the entropy bonus")
    reference: Number = Field(default=0.001, description="β, the weight of the divergence from the reference policy")
    lr: Number = Field(default=1e-6, description="learning rate")
    warmup: Share = Field(default=0.05, description="share of the steps in which the learning rate rises")
    critic_lr: Number = Field(default=1e-5, description="the critic's learning rate")
    critic_warmup: Share = Field(
        default=0.015, description="share of the steps in which the critic's learning rate rises"
    )
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="schedule of the learning rates after the warm-up"
    )
    weight_decay: Number = Field(default=0.0, description="weight decay of AdamW")
    max_grad_norm: PositiveNumber = Field(
        default=1.0, description="gradients with a larger norm are scaled to this norm"
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class TeacherConfig:
    """The distillation term."""

    state: Literal["aligned", "persistent", "none"] = Field(
        default="aligned",
        description="what the teacher reads: aligned (MemOPD), persistent (the paper's control), or none (no teacher)",
    )
    mask: Literal["all", "think", "action"] = Field(
        default="all",
        description="m^T, the tokens that are distilled: all sampled ones, the <think> part, or the action after it",
    )
    weight: Number = Field(default=0.02, description="λ, the weight of the distillation term")
    divergence: Text = Field(
        default="reverse_kl",
        description="reverse_kl, forward_kl, jsd:0.5 (its β), top_k:64, or package.module:function",
    )


@dataclass(frozen=True, slots=True, config=_CONFIG)
class SftConfig:
    """Supervised training on recorded interactions."""

    start: Text = Field(
        default="", description="the model to start from: a folder, or a config.json for random weights"
    )
    tokenizer: Text = Field(default="", description="the tokenizer's folder, if the model's folder has no tokenizer")
    episodes: Texts = Field(default=(), description="episode stores to imitate")
    dev: Texts = Field(default=(), description="episode stores to measure the loss on")
    keep: Texts = Field(
        default=("correct", "valid"),
        description="conditions that an interaction must meet to be imitated; the default is the paper's; correct "
        "needs a reward that is 0 for a wrong number of answers, as em and f1 are and em_partial is not",
    )
    tokens: Positive = Field(default=50_000_000, description="total number of tokens to train on, prompts included")
    batch: Positive = Field(default=24_576, description="tokens per optimiser step")
    lr: Number = Field(default=8e-4, description="learning rate after a short warm-up; a cosine reduces it to a tenth")
    short: Share = Field(
        default=0.6, description="share of the run that uses only episodes of at most short_k questions"
    )
    short_k: Whole = Field(default=2, description="the most questions per episode in that share of the run")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class LoraSettings:
    """Low-rank adapters: the base stays frozen, and only the adapters and the critic's last layer are trained."""

    rank: Whole = Field(default=0, description="rank of the adapters; 0: no adapters, all weights are trained")
    alpha: Whole = Field(default=0, description="α: an adapter's product is scaled by α / rank; 0: twice the rank")
    dropout: Annotated[float, Field(strict=True, ge=0), AfterValidator(_no_dropout)] = Field(
        default=0.0, description="must be 0, as all dropout is: calls that share rows would share its mask"
    )
    targets: Texts = Field(
        default=("all-linear",),
        description="names of the linear layers to adapt, such as q_proj and v_proj; all-linear: all but the head",
    )

    @property
    def scale(self) -> int:
        """α."""
        return self.alpha or 2 * self.rank


@dataclass(frozen=True, slots=True, config=_CONFIG)
class RunSettings:
    """The seed, checkpoints, equivalence checks and evaluations."""

    seed: Whole = Field(default=0, description="seed of everything that is drawn")
    save_every: Positive = Field(default=10, description="steps between checkpoints")
    keep: Positive = Field(default=2, description="checkpoints to keep")
    check_every: Whole = Field(
        default=50, description="steps between equivalence checks; the first batch is always checked"
    )
    dev_every: Whole = Field(default=0, description="steps between evaluations on tasks.dev; 0: never")
    dev_tasks: Positive = Field(default=128, description="tasks per evaluation while training")
    trackers: Texts = Field(default=(), description="where the metrics go too: wandb, trackio")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class RunConfig:
    """The configuration of `memopd sft` and `memopd train`."""

    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    sampling: SamplingConfig = SamplingConfig()
    optimise: OptimiseConfig = OptimiseConfig()
    teacher: TeacherConfig = TeacherConfig()
    sft: SftConfig = SftConfig()
    lora: LoraSettings = LoraSettings()
    run: RunSettings = RunSettings()

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


# What `--protocol NAME` sets: conventions of other projects where they differ from our defaults. docs/tasks.md compares
# them. Evaluation also samples as that project's evaluation does; a policy is trained on its whole distribution.
PROTOCOLS: dict[str, dict[str, Any]] = {"mem1": {"turns": 6, "reward": "em_partial", "grading": "mem1"}}
EVALUATED: dict[str, dict[str, Any]] = {"mem1": {"temperature": 0.01, "top_p": 0.95, "max_tokens": 1024}}

SECTIONS: dict[str, type[Any]] = get_type_hints(RunConfig)
_ADAPTER = TypeAdapter(RunConfig)


def load_config(path: str | Path, overrides: dict[str, str] | None = None) -> RunConfig:
    """Read a TOML file, then apply `{"optimise.lr": "1e-5"}` from the command line."""
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
            meant = _did_you_mean(f"--{other}" for other in _like(section, key))
            raise ValueError(f"--{name}: unknown section {section!r}: {meant or _one_of(SECTIONS)}")
        if isinstance(values := table.setdefault(section, {}), dict):
            values[key] = _from_text(section, key, text)
        sources[section, key] = f"--{name}"
    old = table.get("optimise")
    if isinstance(old, dict) and "advantages" in old:
        log.info('%s: optimise.advantages is now called optimise.algorithm: "gae" is "ppo", "group" is "grpo"', path)
    return from_tables(table, str(path), sources)


def from_tables(table: dict[str, Any], source: str, sources: dict[tuple[str, str], str] | None = None) -> RunConfig:
    """Check the tables of a TOML file, or of JSON that `as_json` wrote in this version or an older one.

    Errors name the `source`, or the option that set the value (`sources`).
    """
    for section, values in table.items():
        if section not in SECTIONS or not isinstance(values, dict):
            meant = _did_you_mean(f"[{other}]" for other in _close(section, SECTIONS))
            raise ValueError(f"{source}: unknown section [{section}]: {meant or _one_of(SECTIONS)}")
    try:
        return _ADAPTER.validate_python(_with_current_names(table, source))
    except ValidationError as error:
        raise ValueError(_line(error, source, sources or {})) from None


def json_schema() -> dict[str, Any]:
    """The JSON schema, for editors: every setting with its type, bounds, default and description."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_ADAPTER.json_schema()}


def _with_current_names(table: dict[str, Any], source: str) -> dict[str, Any]:
    """Rename the settings of older versions."""
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
                f"{source}: optimise.advantages: {other!r} is not one of gae, group; it is now optimise.algorithm"
            )
    return table | {"optimise": optimise}


def _line(error: ValidationError, source: str, sources: dict[tuple[str, str], str]) -> str:
    """Describe the first of pydantic's errors in one line."""
    first = error.errors(include_url=False)[0]
    where = first["loc"]
    section, key = str(where[0]), str(where[1])
    name = sources.get((section, key), f"{source}: {section}.{key}")
    if first["type"] in schema.UNKNOWN:
        dashes = "--" if name.startswith("--") else ""
        meant = _did_you_mean(f"{dashes}{other}" for other in _like(section, key))
        return f"{name}: no such setting; {meant or _one_of(_names(section))}"
    if len(where) > 2:
        return f"{name}: must be a list of strings, got {schema.short(first['input'])} in it"
    return f"{name}: {schema.message(first)}"


def _like(section: str, key: str) -> list[str]:
    """The settings that a mistyped one may be: the closest of its section, or that of its name in other sections."""
    for near in [section] if section in SECTIONS else _close(section, SECTIONS):
        if found := _close(key, _names(near)):
            return [f"{near}.{found[0]}"]
    return [f"{other}.{key}" for other in SECTIONS if key in _names(other)]


def _close(name: str, names: Iterable[str]) -> list[str]:
    return get_close_matches(name, list(names), n=1, cutoff=0.7)  # at 0.6, lora would be close to lr


def _names(section: str) -> list[str]:
    return [f.name for f in fields(SECTIONS[section])]


def _did_you_mean(names: Iterable[str]) -> str:
    """The question, or nothing without names."""
    meant = " or ".join(names)
    return f"did you mean {meant}?" if meant else ""


def _one_of(names: Iterable[str]) -> str:
    return f"choose from {', '.join(names)}"


def _from_text(section: str, key: str, text: str) -> Any:
    """Convert a value from the command line to its TOML type. The field itself rejects text that does not convert."""
    kind = get_type_hints(SECTIONS[section]).get(key)
    if kind == tuple[str, ...]:
        return [part for part in text.split(",") if part]
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text
