"""A student and a teacher must mean the same by an id."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer


def check_same_tokenizer(student: str, teacher: str) -> bool:
    """Raise when both have a tokenizer and these differ; False when there is nothing to compare.

    Widths of the vocabulary head may differ (Qwen2.5-3B has 151,936 logits, 7B 152,064): padding, not tokens.
    """
    loaded: list[Any] = []
    for path in (student, teacher):
        try:
            loaded.append(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
        except (OSError, ValueError):
            return False
    a, b = (tokenizer.get_vocab() for tokenizer in loaded)
    if a != b:
        differ = next(token for token in [*a, *b] if a.get(token) != b.get(token))
        raise ValueError(
            f"{student} and {teacher} have different tokenizers (of {len(a)} and {len(b)} tokens, e.g. {differ!r}): "
            "a teacher must share the student's"
        )
    return True
