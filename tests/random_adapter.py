"""Adapters with random weights, B included: an adapter whose B is zero, as a new one's is, would hide most mistakes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memopd.models.adapters import adapter_weights, add_adapter, new_config, save_adapter
from memopd.models.load import load_causal_lm, load_tokenizer
from memopd.verify.families import VOCABULARY, tiny_model

RANK, ALPHA = 4, 8


def write_base(folder: Path, seed: int) -> Path:
    """A tiny model with a tokenizer."""
    tiny_model("qwen2", seed).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def randomise(model, name: str = "student", seed: int = 0, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter_weights(model, name).values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def add_random(model, name: str = "student", seed: int = 0, targets: tuple[str, ...] = ("all-linear",)):
    add_adapter(model, new_config(RANK, ALPHA, targets), name, trainable=True)
    randomise(model, name, seed)
    return model


def write_random(folder: Path, base: Path, seed: int = 0, targets: tuple[str, ...] = ("all-linear",)) -> Path:
    model = add_random(load_causal_lm(str(base), torch.float32), "student", seed, targets)
    save_adapter(folder, model, "student", str(base), load_tokenizer(str(base)))
    return folder
