"""Loads models and tokenizers from a folder or the hub: only safetensors, no remote code, one-line errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from memopd.files import check_digests


def check_model_folder(path: str) -> None:
    """Refuse a folder without a model. A name with one slash and no leading dot passes, as it may be on the hub."""
    first, *rest = path.split("/")
    local = Path(path).exists() or path.startswith((".", "/")) or len(rest) > 1 or bool(rest and Path(first).is_dir())
    if local and not Path(path, "config.json").is_file():
        raise ValueError(f"{path}: there is no model here (no config.json)")


def load_causal_lm(path: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Load a model folder or hub name. A config.json alone gives random weights from the seed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if path.endswith(".json"):
        config = transformers.AutoConfig.for_model(**json.loads(Path(path).read_text()))
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_model_folder(path)
    check_digests(Path(path))
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except SafetensorError as error:
        raise ValueError(f"{path}: its weights are cut short or damaged ({error}): copy them again") from None


def load_tokenizer(path: str, local: bool = False) -> Any:
    """The tokenizer of a model folder or hub name. `local` never uses the network."""
    check_digests(Path(path), skip="*.safetensors")
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no tokenizer can be loaded from it ({str(error).splitlines()[0]})") from None


def check_same_tokenizer(student: str, teacher: str) -> bool:
    """Raise an error if both have a tokenizer and these differ. Returns False if one has none.

    An id must mean the same to a student and its teacher. The widths of their vocabulary heads may differ (Qwen2.5-3B
    has 151,936 logits, 7B has 152,064): that is padding, not tokens.
    """
    try:
        a, b = (load_tokenizer(path).get_vocab() for path in (student, teacher))
    except ValueError:
        return False
    if a != b:
        differ = next(token for token in [*a, *b] if a.get(token) != b.get(token))
        raise ValueError(
            f"{student} and {teacher} have different tokenizers (of {len(a)} and {len(b)} tokens, e.g. {differ!r}): "
            "a teacher must have the student's tokenizer"
        )
    return True


def backbone(model: Any) -> Any:
    """The model without its vocabulary or value head."""
    return model.get_decoder()


def critic_from(student: Any) -> Any:
    """V_φ: the student's backbone and a value head that starts at zero."""
    config = copy.deepcopy(student.config)
    config.num_labels = 1
    try:
        critic = transformers.AutoModelForTokenClassification.from_config(config, dtype=student.dtype)
    except ValueError:
        kind = type(student).__name__
        raise ValueError(f'{kind}: transformers has no critic of its kind: set optimise.algorithm = "grpo"') from None
    backbone(critic).load_state_dict(backbone(student).state_dict())
    nn.init.zeros_(critic.score.weight)
    if critic.score.bias is not None:
        nn.init.zeros_(critic.score.bias)
    return critic
