"""LoRA adapters in PEFT's format: checks a folder against its base model, adds it to a loaded model, writes it.

    adapter_config.json, adapter_model.safetensors   as PEFT writes and reads them
    tokenizer files                                  of the base
    memopd.json                                      the digests of the base's weights and of the tokenizer

PEFT puts the adapters into the layers of the model, which stays the Hugging Face model that it is. Several adapters can
share one base; `activate` chooses which one computes. Their weights are kept in float32 even if the base is in half
precision, and multiply in the precision of the base: the result is that of FSDP's mixed precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from memopd.files import check_digests, json_object, whole_folder, write_digests
from memopd.models.folder import ADAPTER_CONFIG, CARD
from memopd.models.load import check_model_folder, load_causal_lm, load_tokenizer

log = logging.getLogger("memopd")

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's files
STUDENT = "student"  # the name of an adapter in a model that has no other

# Settings of adapter_config.json that may have any value: they say where and how large the adapter is, or nothing.
_FREE = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out"),
}
_PLAIN_STARTS = (True, False, "gaussian")  # of init_lora_weights; the others also change the base's weights


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that fits its base."""

    folder: str
    base: str
    rank: int
    alpha: float
    layers: tuple[str, ...]  # the names of the layers that it adapts
    uniform: bool  # rank and alpha say all of its shapes and scales
    verified: bool  # False: it was made elsewhere, and does not say which weights it was trained on


# ---- folders ----------------------------------------------------------------------------------------------------


def check_adapter(folder: str, base: str) -> AdapterInfo:
    """Refuse a folder that is no LoRA adapter, or is one of another base. Reads no weights into memory."""
    config = _read_config(folder)
    check_digests(Path(folder))
    model = empty_model(base)
    try:
        _fit(folder, base, config, model)
    except ValueError:  # of another base, if the card says so: that explains what does not fit
        if Path(folder, CARD).is_file():
            _is_verified(folder, base)
        raise
    layers = adapted_layers(model, "student")
    uniform = not (config.rank_pattern or config.alpha_pattern or config.use_rslora)
    return AdapterInfo(folder, base, config.r, config.lora_alpha, layers, uniform, _is_verified(folder, base))


def _fit(folder: str, base: str, config: LoraConfig, model: Any) -> None:
    """Add the adapter's layers to an empty model of the base, and compare their names and shapes with the file's."""
    _inject(model, config, "student", folder)
    expected = {_peft_name(name, "student"): list(p.shape) for name, p in adapter_weights(model, "student").items()}
    held = _shapes(Path(folder, WEIGHTS))
    if extra := sorted(held.keys() - expected.keys()):
        raise ValueError(f"{folder}: adapts {extra[0]}, which its target_modules in {base} do not: is it of this base?")
    if missing := sorted(expected.keys() - held.keys()):
        raise ValueError(f"{folder}: lacks {missing[0]}, which its target_modules in {base} need: is it of this base?")
    if wrong := sorted(name for name in held if held[name] != expected[name]):
        shapes = f"has shape {held[wrong[0]]}, and rank {config.r} on {base} needs {expected[wrong[0]]}"
        raise ValueError(f"{folder}: {wrong[0]} {shapes}: it is of another base or rank")


def _is_verified(folder: str, base: str) -> bool:
    """Compare the digests in the card, if there is one, with those of the base."""
    file = Path(folder, CARD)
    if not file.is_file():
        log.info(
            "%s: was made elsewhere and does not name its base's weights: that it is of %s is unknown", folder, base
        )
        return False
    try:
        card = json_object(file.read_bytes())
        trained_on, tokens = str(card["base_digest"]), card["tokenizer_digest"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: not a card of an adapter ({error}): copy the folder again") from None
    if trained_on != base_digest(base):
        raise ValueError(
            f"{folder}: was trained on other weights than those of {base} (on {card.get('base')}, digest "
            f"{trained_on[:12]}; this is {base_digest(base)[:12]}): name that base"
        )
    if tokens is not None and has_tokenizer(base) and tokens != tokenizer_digest(load_tokenizer(base)):
        raise ValueError(f"{folder}: was trained with another tokenizer than that of {base}: name its own base")
    return True


def _read_config(folder: str) -> LoraConfig:
    """The settings of an adapter. Refuses whatever would not compute exactly."""
    file = Path(folder, ADAPTER_CONFIG)
    if not file.is_file():
        inside = Path(folder, "adapter")
        hint = f": give {inside}" if (inside / ADAPTER_CONFIG).is_file() else ""
        raise ValueError(f"{folder}: there is no adapter here (no {ADAPTER_CONFIG}){hint}")
    if not Path(folder, WEIGHTS).is_file():
        raise ValueError(f"{folder}: there are no weights here (no {WEIGHTS}; other formats are not loaded)")
    try:
        held = json_object(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if held.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {held.get('peft_type')!r}: only LORA adapters are supported")
    known = LoraConfig().to_dict()
    for name, value in held.items():
        free = name in _FREE or (name == "init_lora_weights" and value in _PLAIN_STARTS)
        if value and not free and value != known.get(name):
            raise ValueError(f"{file}: uses {name} = {value!r}, which is not supported: train a plain LoRA adapter")
    targets = held.get("target_modules")
    named = isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)
    if not (named or (isinstance(targets, str) and targets)):
        raise ValueError(f"{file}: target_modules must name the layers, got {targets!r}")
    for name in ("r", "lora_alpha"):
        if isinstance(value := held.get(name), bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{file}: {name} must be a number above 0, got {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(held.get(name) or {}, dict):
            raise ValueError(f"{file}: {name} must be an object, got {held[name]!r}")
    arguments = {name: held[name] for name in _FREE & held.keys() & known.keys() - {"peft_type", "peft_version"}}
    return LoraConfig(**arguments | {"lora_dropout": 0.0, "r": int(held["r"])})  # see docs/training.md on dropout


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        with safe_open(file, "pt") as reader:
            return {name: list(reader.get_slice(name).get_shape()) for name in sorted(reader.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: cut short or damaged ({error}): copy it again") from None


def save_adapter(
    folder: str | Path, model: Any, name: str, base: str, tokenizer: Any, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write an adapter of `model` to a folder, which replaces an existing one.

    `weights` are those of `adapter_weights`, for a model whose own are sharded.
    """
    weights = adapter_weights(model, name) if weights is None else weights
    tensors = {_peft_name(key, name): value.detach().cpu().contiguous() for key, value in weights.items()}
    config = copy(model.peft_config[name])
    config.base_model_name_or_path, config.task_type, config.inference_mode = base, "CAUSAL_LM", True
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)
    card = {
        "base": base,
        "base_digest": base_digest(base),
        "tokenizer_digest": None if tokenizer is None else tokenizer_digest(tokenizer),
    }
    with whole_folder(Path(folder)) as partial:
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        config.save_pretrained(partial)
        (partial / CARD).write_text(json.dumps(card, indent=2) + "\n")
        try:
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors wraps system errors, such as a full disk
            raise OSError(f"{folder}: cannot be written ({error}); --resume writes it again") from None
        write_digests(partial)


# ---- adapters in a loaded model ---------------------------------------------------------------------------------


def load_adapter(model: Any, folder: str, name: str = STUDENT, trainable: bool = False) -> None:
    """Add the adapter of a folder to a loaded model, in place, and activate it. `check_adapter` says if it fits."""
    config = _read_config(folder)
    check_digests(Path(folder))
    tensors = load_file(Path(folder, WEIGHTS))
    add_adapter(model, config, name, trainable, folder)
    with torch.no_grad():
        for key, weight in adapter_weights(model, name).items():
            if (held := tensors.pop(_peft_name(key, name), None)) is None or held.shape != weight.shape:
                raise ValueError(f"{folder}: does not fit this model at {key}: it is of another base or rank")
            weight.copy_(held)
    if tensors:
        raise ValueError(f"{folder}: adapts {next(iter(tensors))}, which this model does not: it is of another base")


def new_config(rank: int, alpha: float, targets: tuple[str, ...]) -> LoraConfig:
    """The settings of a new adapter. `targets` are names of layers, or all-linear."""
    if not targets or ("all-linear" in targets and len(targets) > 1):
        raise ValueError("lora.targets: name linear layers, or all-linear alone")
    names: Any = "all-linear" if targets == ("all-linear",) else list(targets)
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]  # it divides by r


def add_adapter(model: Any, config: LoraConfig, name: str, trainable: bool, source: str = "lora.targets") -> None:
    """Add a new adapter to a loaded model, in place, and activate it. It changes nothing before it is trained.

    PEFT freezes the base. Adapters that are there already stay trainable or frozen.
    """
    before = [(p, p.requires_grad) for p in model.parameters()] if hasattr(model, "peft_config") else []
    _inject(model, copy(config), name, source)
    for parameter, requires_grad in before:
        parameter.requires_grad_(requires_grad)
    dtype = torch.promote_types(model.dtype, torch.float32)
    for _, layer in _layers(model):
        if name in layer.lora_A:
            layer.cast_input_dtype_enabled = False  # our linear layers cast their weights, not the rows
            for part in (layer.lora_A, layer.lora_B):
                part[name] = _MasterLinear(part[name].weight.detach().to(dtype), trainable)
    activate(model, name)


class _MasterLinear(nn.Linear):
    """A linear layer that keeps precise weights and multiplies in the precision of its input.

    The gradient reaches the precise weights, so that sums over packs and small steps are not lost in half precision.
    """

    def __init__(self, weight: Tensor, trainable: bool) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


def activate(model: Any, name: str | None) -> None:
    """From now on, `model` computes with this adapter alone; with None, the bare base.

    PEFT's own `set_adapter` would also freeze all other adapters, which are trained in turn here. FSDP does not notice
    such a change of a sharded weight.
    """
    activate_in(tuner_layers(model), name)


def tuner_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def activate_in(layers: Sequence[Any], name: str | None) -> None:
    """`activate` for those who know the layers. Finding them takes as long as a pass of a small model."""
    wanted = [] if name is None else [name]
    for layer in layers:
        if layer._active_adapter != wanted:
            layer._active_adapter = wanted


def adapter_weights(model: Any, name: str) -> dict[str, Tensor]:
    """The weights of one adapter, under their names in the model."""
    ends = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    return {key: p for key, p in model.named_parameters() if key.endswith(ends)}


def is_adapter_weight(key: str) -> bool:
    return ".lora_A." in key or ".lora_B." in key


def adapted_layers(model: Any, name: str) -> tuple[str, ...]:
    """The names of the layers that an adapter changes."""
    return tuple(key for key, layer in _layers(model) if name in layer.lora_A)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    for key, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield key, module


def _peft_name(key: str, name: str) -> str:
    return PREFIX + key.removesuffix(f".{name}.weight") + ".weight"


def _inject(model: Any, config: LoraConfig, name: str, source: str) -> None:
    """Let PEFT put an adapter into the layers that `config` names. Errors name the `source` of these names."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    for target in () if isinstance(config.target_modules, str) else config.target_modules or ():
        found = [(key, m) for key, m in model.named_modules() if key == target or key.endswith(f".{target}")]
        if not found:
            raise ValueError(
                f"{source}: {type(model).__name__} has no layer {target!r}: name linear layers, or all-linear"
            )
        for key, module in found:
            if module in ends or not isinstance(module, nn.Linear | Conv1D | LoraLinear):
                raise ValueError(
                    f"{source}: {key} cannot be adapted: only linear layers can, and neither the vocabulary head nor "
                    "the embedding"
                )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # several adapters are what we want
            inject_adapter_in_model(config, model, name, low_cpu_mem_usage=model.device.type == "meta")
    except (ValueError, re.error) as error:  # a pattern of names that finds no layer, or one of another kind
        raise ValueError(f"{source}: {str(error).splitlines()[0]}") from None
    if any(
        isinstance(module, BaseTunerLayer) for module in (model.get_output_embeddings(), model.get_input_embeddings())
    ):
        raise ValueError(f"{source}: neither the vocabulary head nor the embedding can be adapted")


def write_merged(output: Path, base: str, folder: str, dtype: str | None = None) -> None:
    """Write a model folder whose weights are those of the base plus those of the adapter.

    The sum is taken in float32 and rounded once, to `dtype` or to the precision of the base's checkpoint. The tokenizer
    is the base's.
    """
    saved = getattr(torch, dtype) if dtype else (transformers.AutoConfig.from_pretrained(base).dtype or torch.float32)
    model = load_causal_lm(base, torch.promote_types(saved, torch.float32))
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True).to(saved)
    with whole_folder(output) as partial:
        if has_tokenizer(base):
            load_tokenizer(base).save_pretrained(partial)
        try:
            merged.save_pretrained(partial)
        except SafetensorError as error:  # safetensors wraps system errors, such as a full disk
            raise OSError(f"{output}: cannot be written ({error})") from None
        write_digests(partial)


# ---- what a base is ---------------------------------------------------------------------------------------------


def empty_model(path: str) -> Any:
    """A model without weights, which has the shapes of all its layers."""
    check_model_folder(path)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def base_digest(path: str) -> str:
    """The SHA-256 of a model's weights: names, types, shapes and values, however they are spread over files."""
    files = _weight_files(path)
    return _digest(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files))


@lru_cache(maxsize=8)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    """Sizes and times are arguments so that a file that changed is read again."""
    try:
        readers = [safe_open(file, "pt") for file, _, _ in files]
        where = {key: reader for reader in readers for key in sorted(reader.keys())}
        total = hashlib.sha256()
        for key in sorted(where):
            tensor = where[key].get_tensor(key)
            total.update(f"{key} {tensor.dtype} {list(tensor.shape)}\n".encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    except SafetensorError as error:
        raise ValueError(f"{Path(files[0][0]).parent}: its weights are cut short or damaged ({error})") from None
    return total.hexdigest()


def _weight_files(path: str) -> list[Path]:
    folder = _local_folder(path)
    files = sorted(f for f in folder.glob("*.safetensors") if f.name != WEIGHTS)
    if not files:
        raise ValueError(f"{path}: there are no weights in it (no *.safetensors)")
    return files


def _local_folder(path: str) -> Path:
    """The folder itself, or the one to which a model of the hub was downloaded."""
    if Path(path).is_dir():
        return Path(path)
    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))


def same_base(a: str, b: str) -> bool:
    """Whether two folders or hub names are the same model: the same settings and the same weights."""
    if a == b or _local_folder(a).resolve() == _local_folder(b).resolve():
        return True
    return _settings(a) == _settings(b) and base_digest(a) == base_digest(b)


def _settings(path: str) -> dict[str, Any]:
    held = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()
    return {key: value for key, value in held.items() if key not in ("transformers_version", "_name_or_path", "dtype")}


def has_tokenizer(path: str) -> bool:
    folder = _local_folder(path)
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def tokenizer_digest(tokenizer: Any) -> str:
    """The SHA-256 of what every id means."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
