"""Drift: an agent sends earlier replies back as text, and the text may encode to other ids than the model sampled.

The model then reads a history that it did not write. `chat_ids` replaces the text of an earlier reply by its sampled
ids if the chat template passes the reply on unchanged. `drift` reports where the ids of a prompt differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd.types import Ids

_MIN_TOKENS = 4  # a shorter reply ("Yes") may be in a prompt by chance


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An earlier completion of the episode, without the end-of-turn token, which the chat template adds."""

    ids: Ids
    text: str
    shown: str  # the text that the client received: up to the stop string


@dataclass(frozen=True, slots=True)
class History:
    """How many earlier replies a prompt repeats, and how many of them have other ids than the model sampled.

    >>> History(replies=3, drifted=1, first=417).drifted  # one of three has other ids, from position 417 on
    1
    """

    replies: int = 0
    drifted: int = 0
    first: int | None = None  # the first position in the prompt whose id differs from the sampled one


def decode(tokenizer: Any, ids: Sequence[int] | Ids) -> str:
    """The text of all ids, including special tokens, with every space as it is."""
    return str(tokenizer.decode(_list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []


def reply_of(tokenizer: Any, completion: Ids, shown: int) -> Reply:
    """`shown` is the number of characters that the client received."""
    ids = completion[:-1] if int(completion[-1]) in tokenizer.all_special_ids else completion
    text = decode(tokenizer, ids)
    return Reply(ids, text, text[:shown])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]], replies: Sequence[Reply]) -> list[int]:
    """The prompt's ids under the chat template, with the sampled ids for messages that repeat an earlier reply.

    A message repeats a reply if their texts are equal. The sampled ids are used only if the template passes replies on
    unchanged and the text of the whole prompt stays the same.
    """
    text = rendered(tokenizer, messages)
    ids = encode(tokenizer, text)
    sampled = {reply.text: reply.ids for reply in replies}  # the last of several equal replies
    repeated = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"] in sampled]
    if not repeated:
        return ids
    marks = {n: f"\ue000{n}\ue001" for n in repeated}  # private-use characters, which ordinary text does not have
    marked = [{**m, "content": marks[n]} if n in marks else m for n, m in enumerate(messages)]
    rest = rendered(tokenizer, marked)
    spliced: list[int] = []
    rebuilt = ""
    for n in repeated:
        before, mark, rest = rest.partition(marks[n])
        if not mark:
            return ids
        spliced += encode(tokenizer, before) + sampled[messages[n]["content"]].tolist()
        rebuilt += before + messages[n]["content"]
    spliced += encode(tokenizer, rest)
    if rebuilt + rest != text or decode(tokenizer, spliced) != decode(tokenizer, ids):
        return ids
    return spliced


def drift(tokenizer: Any, prompt: Sequence[int], replies: Sequence[Reply]) -> History:
    """Count the replies that this prompt repeats, and find where their ids differ from the sampled ones."""
    packed = np.asarray(prompt, np.int32).tobytes()
    text: str | None = None
    found = drifted = 0
    first: int | None = None
    for reply in replies:
        if len(reply.ids) < _MIN_TOKENS:
            continue
        if _contains(packed, reply.ids.tobytes()):
            found += 1
            continue
        text = decode(tokenizer, prompt) if text is None else text
        repeated = reply.text if reply.text in text else reply.shown
        if not repeated.strip() or repeated not in text:
            continue
        found += 1
        position = _first_difference(tokenizer, prompt, text.index(repeated), reply.ids, len(repeated))
        if position is not None:
            drifted += 1
            first = position if first is None else min(first, position)
    return History(found, drifted, first)


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def _first_difference(tokenizer: Any, prompt: Sequence[int], at: int, sampled: Ids, length: int) -> int | None:
    """The first position at which the ids of the text from character `at` on differ from the sampled ones."""
    start = bisect_right(range(len(prompt) + 1), at, key=lambda n: len(decode(tokenizer, prompt[:n]))) - 1
    if len(decode(tokenizer, prompt[:start])) < at:
        return start  # one token contains both the reply's first character and the one before it
    same = 0
    while same < min(len(sampled), len(prompt) - start) and sampled[same] == prompt[start + same]:
        same += 1
    return None if len(decode(tokenizer, sampled[:same])) >= length else start + same


def _contains(data: bytes, part: bytes) -> bool:
    at = data.find(part)
    while at >= 0 and at % 4:  # a match that begins in the middle of an id is none
        at = data.find(part, at + 1)
    return at >= 0


def _list(ids: Sequence[int] | Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
