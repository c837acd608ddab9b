"""Converts text to token ids and back, with the tokenizer of the engine's model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd.tasks import Task
from memopd.types import Ids


@dataclass(frozen=True, slots=True)
class Codec:
    """Converts text to ids and back, for memory rules that rewrite text."""

    encode: Callable[[str], Ids]
    decode: Callable[[Ids], str]


def codec_of(tokenizer: Any) -> Codec:
    def encode(text: str) -> Ids:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Codec(encode, decode)


def prefix_of(tokenizer: Any, message: str) -> Ids:
    """q: the chat template of the user turn, and the start of the assistant turn."""
    turns = [{"role": "user", "content": message}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise any exception
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"{_name(tokenizer)}: its chat template cannot be used ({why})") from None
    return codec_of(tokenizer).encode(text)


def check_template(tokenizer: Any) -> None:
    """Raise an error before anything is sampled if prompts cannot be made, or do not contain the question."""
    question = "Which river is it?"
    if question not in codec_of(tokenizer).decode(prefix_of(tokenizer, question)):
        raise ValueError(f"{_name(tokenizer)}: its chat template leaves out the user's turn")


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "the tokenizer"


def check_fits(task: Task, prefix: Ids, limit: int, setting: str = "max_context") -> None:
    if len(prefix) >= limit:
        raise ValueError(
            f"task {task.id!r}: its prompt has {len(prefix)} tokens, and {setting} is {limit}: raise it, or leave "
            "the task out"
        )
