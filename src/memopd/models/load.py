"""Loads models and tokenizers from a folder or the hub: only safetensors, no remote code, one-line errors."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from memopd.files import check_digests, read_object
from memopd.models.folder import (
    CONFIG,
    check_config,
    check_loaded,
    check_model_files,
    check_on_hub,
    check_tokenizer_files,
    explained,
    explained_tokenizer,
    is_folder,
    refuse_adapter,
    refuse_no_model,
    refuse_run,
)


def check_model_folder(path: str) -> None:
    """Refuse a folder without a model. A name that may be on the hub passes."""
    if is_folder(path):
        refuse_run(path)
        if not Path(path, CONFIG).is_file():
            refuse_no_model(path)


def load_causal_lm(path: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Load a model folder or hub name. A config.json alone gives random weights from the seed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if path.endswith(".json") and not Path(path).is_dir():
        shape = read_object(Path(path))
        check_config(path, shape)
        make = partial(transformers.AutoConfig.for_model, **shape)
        with explained(path, path, make):
            config = make()
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    check_model_folder(path)
    if Path(path).is_dir():
        check_digests(Path(path))
        check_model_files(Path(path))
    else:
        check_on_hub(path)
        check_config(f"{path}/{CONFIG}", transformers.PreTrainedConfig.get_config_dict(path)[0])
    with explained(path, f"{path}/{CONFIG}", partial(transformers.AutoConfig.from_pretrained, path)):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            ignore_mismatched_sizes=True, output_loading_info=True,  # so that we can name what does not fit
        )  # fmt: skip
    model, report = loaded
    check_loaded(path, report)
    if hasattr(model, "peft_config"):  # of a hub name, whose files are not seen before
        refuse_adapter(path)
    return model


def load_tokenizer(path: str, local: bool = False) -> Any:
    """The tokenizer of a model folder or hub name. `local` never uses the network."""
    if Path(path).is_dir():
        refuse_run(path)
        check_digests(Path(path), skip="*.safetensors")
        check_tokenizer_files(Path(path))
    elif is_folder(path):
        raise ValueError(f"{path}: no tokenizer can be loaded from it (there is no such folder)")
    elif not local:
        check_on_hub(path)
    with explained_tokenizer(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=local, trust_remote_code=False)
    files = tokenizer.vocab_files_names.values()  # empty for a tokenizer that needs none, such as one of bytes
    if Path(path).is_dir() and files and not any(Path(path, file).is_file() for file in files):
        # transformers would make a tokenizer without tokens.
        raise ValueError(f"{path}: no tokenizer can be loaded from it (it has none of {', '.join(files)})")
    return tokenizer


def check_same_tokenizer(student: str, teacher: str) -> None:
    """Raise an error if the tokenizers of a student and its teacher differ, or if one of them cannot be read.

    An id must mean the same to both, and without a tokenizer nothing shows that it does. The widths of their vocabulary
    heads may differ (Qwen2.5-3B has 151,936 logits, 7B has 152,064): that is padding, not tokens.
    """
    if student == teacher:
        return
    try:
        a, b = (load_tokenizer(path).get_vocab() for path in (student, teacher))
    except ValueError as error:
        raise ValueError(
            f"{error}: a teacher is used only if its tokenizer and the student's can be compared; if they are the "
            "same, copy the tokenizer's files into the folder that lacks them"
        ) from None
    if a != b:
        differ = next(token for token in [*a, *b] if a.get(token) != b.get(token))
        raise ValueError(
            f"{student} and {teacher} have different tokenizers (of {len(a)} and {len(b)} tokens, e.g. {differ!r}): "
            "a teacher must have the student's tokenizer"
        )


def backbone(model: Any) -> Any:
    """The model without its vocabulary or value head."""
    return model.get_decoder()


def critic_from(student: Any) -> Any:
    """V_φ: a copy of the student's backbone, and a value head that starts at zero."""
    critic = _new_critic(student)
    backbone(critic).load_state_dict(backbone(student).state_dict())
    _zero(critic.score)
    return critic


def critic_over(student: Any) -> Any:
    """V_φ over the student's own backbone, not a copy: only the value head, in float32, takes memory."""
    with torch.device("meta"):
        critic = _new_critic(student)
    setattr(critic, critic.base_model_prefix, backbone(student))
    critic.config = student.config  # the layers read their attention setting from it
    critic.score.to_empty(device=student.device).to(torch.promote_types(student.dtype, torch.float32))
    _zero(critic.score)
    return critic


def _new_critic(student: Any) -> Any:
    config = copy.deepcopy(student.config)
    config.num_labels = 1
    try:
        return transformers.AutoModelForTokenClassification.from_config(config, dtype=student.dtype)
    except ValueError:
        kind = type(student).__name__
        raise ValueError(f'{kind}: transformers has no critic of its kind: set optimise.algorithm = "grpo"') from None


def _zero(head: nn.Linear) -> None:
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
