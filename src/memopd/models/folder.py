"""Checks the files of a model before and after transformers reads them.

transformers answers a broken folder with a traceback from its inside, or fills missing weights with random numbers.
Here every fault is one line that names the file. An error that is not the folder's fault keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, StrictDataclassError
from safetensors import SafetensorError

from memopd.files import read_object

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
ADAPTER_CONFIG, CARD = "adapter_config.json", "memopd.json"  # of an adapter: PEFT's settings, and our note of its base
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", CONFIG)
# What transformers raises for files that it cannot use, besides OSError and ValueError.
_BROKEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, StrictDataclassError)
_UNREACHABLE: Any = (
    OSError,
    HfHubHTTPError.__mro__[1],
)  # the second is the HTTP client's base class, whichever that is
_CODE = "names Python code of its own (auto_map), which is never run: use a model that transformers itself supports"


def is_folder(path: str) -> bool:
    """Whether a model's name can only be a folder. Any other may be on the hub: one slash, and no leading dot."""
    first, *rest = path.split("/")
    below = len(rest) > 1 or bool(rest and Path(first).is_dir())
    return below or path.startswith((".", "/", "~")) or Path(path).exists()


def refuse_run(path: str) -> None:
    """Refuse a run directory of `memopd train` or `memopd sft`: what it trained is in a folder of it."""
    folder = Path(path)
    if not _is_run(folder):
        return
    if (folder / "model").is_dir():
        raise ValueError(f"{path}: is a run directory: give {folder / 'model'}")
    if (adapter := folder / "adapter").is_dir():
        base = _base_of(adapter)
        raise ValueError(f"{path}: is the run of an adapter: give {base} as the model and {adapter} as the adapter")
    raise ValueError(f"{path}: is a run directory without model/ or adapter/, which training writes at its end")


def refuse_no_model(path: str) -> NoReturn:
    """Say what a folder without a config.json is."""
    if Path(path, ADAPTER_CONFIG).is_file():
        base = _base_of(Path(path))
        raise ValueError(f"{path}: is an adapter: give {base} as the model and this folder as the adapter")
    raise ValueError(f"{path}: there is no model here (no {CONFIG})")


def _is_run(folder: Path) -> bool:
    """Whether the config.json of a folder is that of a run, which consists of sections."""
    try:
        held = read_object(folder / CONFIG)
    except (OSError, ValueError):
        return False
    return "model_type" not in held and all(isinstance(held.get(name), dict) for name in ("model", "optimise", "run"))


def _base_of(adapter: Path) -> str:
    """What a message calls the base of an adapter."""
    for file, key in ((CARD, "base"), (ADAPTER_CONFIG, "base_model_name_or_path")):
        try:
            name = read_object(adapter / file).get(key)
        except (OSError, ValueError):
            continue
        if isinstance(name, str) and name:
            return f"its base ({name})"
    return "its base"


def check_on_hub(name: str) -> None:
    """Ask the hub once whether it has the model. transformers would ask for a minute if there is no network."""
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in (CONFIG, "tokenizer_config.json")):
            return
        HfApi().model_info(name, timeout=10)
    except HFValidationError:
        raise ValueError(f"{name}: there is no such folder, and a model on the hub cannot have this name") from None
    except RepositoryNotFoundError:
        raise ValueError(f"{name}: neither a folder here nor a model on the hub that you may read") from None
    except _UNREACHABLE as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{name}: there is no such folder, and the hub cannot be asked for it ({why})") from None


def check_model_files(folder: Path) -> None:
    """The files that transformers reads for a model, except for the weights themselves."""
    check_config(folder / CONFIG, read_object(folder / CONFIG))
    if (folder / ADAPTER_CONFIG).is_file():
        refuse_adapter(folder)
    if (generation := folder / "generation_config.json").is_file():
        ends = read_object(generation).get("eos_token_id")
        if not all(isinstance(i, int | None) for i in (ends if isinstance(ends, list) else [ends])):
            raise ValueError(f"{generation}: eos_token_id must be a token id or a list of them, got {ends!r}")
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return
    if not index.is_file():
        raise ValueError(f"{folder}: has no weights (no model.safetensors; other formats are not read)")
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: has no weight_map, which names the file of every weight: copy it again")
    for file in sorted(set(files.values())):
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}: missing, but {INDEX} names it: copy it again")


def refuse_adapter(path: Path | str) -> NoReturn:
    """transformers adds an adapter that is beside a model without being asked to."""
    raise ValueError(
        f"{path}: has an adapter beside the model ({ADAPTER_CONFIG}): move the adapter's files to a folder of their "
        "own, which --adapter or model.adapter names"
    )


def check_config(file: Path | str, config: Mapping[str, Any]) -> None:
    """The content of a config.json, as far as transformers does not check it itself."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f'{file}: has no model_type, the kind of the model, such as "qwen2"')
    if "auto_map" in config:
        raise ValueError(f"{file}: {_CODE}, or delete auto_map from this file if it supports {kind}")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f'{file}: model_type "{kind}" is unknown to transformers {transformers.__version__}')
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            raise ValueError(f"{file}: quantised models ({name}) are not supported: use the original weights")
    for part, sizes in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(sizes, dict):
            _check_sizes(f"{file}: {part}", sizes)
    for name in ("dtype", "torch_dtype"):
        dtype = config.get(name)
        if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f'{file}: {name}: "{dtype}" is not a precision of torch')


def _check_sizes(place: str, sizes: Mapping[str, Any]) -> None:
    for name in _SIZES:
        if isinstance(value := sizes.get(name), int) and value < 1:
            raise ValueError(f"{place}{name} must be 1 or more, got {value}")
    hidden, heads, shared = (sizes.get(n) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and sizes.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{place}hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(f"{place}num_attention_heads {heads} is not divisible by num_key_value_heads {shared}")


def check_tokenizer_files(folder: Path) -> None:
    found = {name: read_object(folder / name) for name in _TOKENIZER_FILES if (folder / name).is_file()}
    file, config = folder / "tokenizer_config.json", found.get("tokenizer_config.json", {})
    if "auto_map" in config:
        raise ValueError(f"{file}: {_CODE}, or delete auto_map from this file if it supports the tokenizer")
    expected: dict[str, type | tuple[type, ...]] = {"tokenizer_class": str, "added_tokens_decoder": dict}
    expected |= {name: (str, dict) for name in config if name.endswith("_token") and not name.startswith("add_")}
    for name, kind in expected.items():
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise ValueError(f"{file}: {name}: {config[name]!r} is not what a tokenizer can use: copy the file again")
    file = folder / "tokenizer.json"
    if file.is_file() and not {"model", "added_tokens"} <= found[file.name].keys():
        raise ValueError(f"{file}: not a tokenizer (no model or no added_tokens): copy it again")


def check_loaded(path: str, info: Mapping[str, Any]) -> None:
    """Raise an error if the weights are not those that the configuration describes."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"{path}: config.json does not fit the weights: {name} has shape {tuple(found)}, and must have "
            f"{tuple(expected)}: copy both from one model"
        )
    if missing := sorted(info["missing_keys"]):
        count, example = len(missing), missing[0]
        raise ValueError(f"{path}: its files lack {count} of the model's weights, such as {example}: copy it again")
    if left_over := sorted(name for name in info["unexpected_keys"] if re.search(r"(^|\.)layers\.\d+\.", name)):
        raise ValueError(
            f"{path}: config.json does not fit the weights: it describes no place for {len(left_over)} of them, "
            f"such as {left_over[0]}: copy both from one model"
        )


@contextmanager
def explained(path: str, config_file: Path | str, config_of: Callable[[], Any]) -> Iterator[None]:
    """Turns what transformers raises inside the block for a broken model into one line.

    Its errors have no common class. So if the configuration alone cannot be built, without memory for weights, the file
    is at fault; any other error is raised as it is.
    """
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path}: its weights are cut short or damaged ({error}): copy them again") from None
    except _BROKEN:
        try:
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(config_of())
        except _BROKEN as error:
            raise ValueError(f"{config_file}: transformers can make no model of it ({_reason(error)})") from error
        raise


@contextmanager
def explained_tokenizer(path: str) -> Iterator[None]:
    """Does the same for a tokenizer: the configuration or the file of the tokenizer is at fault, or neither."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no tokenizer can be loaded from it ({_reason(error)})") from None
    except Exception:  # raised again below, unless a file is at fault
        try:
            transformers.AutoConfig.from_pretrained(path)
        except _BROKEN as error:
            raise ValueError(f"{path}/{CONFIG}: transformers cannot read it ({_reason(error)})") from error
        except (OSError, ValueError):
            pass  # a tokenizer needs no configuration that transformers knows
        if (file := Path(path, "tokenizer.json")).is_file():
            try:
                tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # tokenizers raises nothing more specific
                raise ValueError(f"{file}: not a tokenizer ({_reason(error)}): copy it again") from error
        raise


def _reason(error: BaseException) -> str:
    """One line: the first of a message that is written for users, and else the last, which says most."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return lines[0] if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {lines[-1].strip()}"
