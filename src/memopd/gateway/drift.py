"""Replies that come back as text: keep their sampled ids where that is exact, and report where the ids differ.

An agent that speaks text sends a reply back as text. Encoding it again need not give the ids that the model sampled,
and then the model reads a history that never happened. `chat_ids` puts the sampled ids of an earlier reply in its
place when the chat template leaves it unchanged; `drift` compares a prompt's ids with those that were sampled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd.types import Ids

_MIN_TOKENS = 4  # shorter replies ("Yes") occur in a prompt by chance


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """An earlier completion of the episode, without the end-of-turn token that the template writes itself."""

    ids: Ids
    text: str
    shown: str  # what the client saw of it: up to the stop string


@dataclass(frozen=True, slots=True)
class History:
    """How many earlier replies a prompt repeats, and how many of them as other ids.

    >>> History(replies=3, drifted=1, first=417).drifted  # one of three came back as other ids, from position 417 on
    1
    """

    replies: int = 0
    drifted: int = 0
    first: int | None = None  # the first position of the prompt at which it reads another id than was sampled


def decode(tokenizer: Any, ids: Sequence[int] | Ids) -> str:
    """The text of every id, special ones too, with no space tidied away."""
    return str(tokenizer.decode(_list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []


def reply_of(tokenizer: Any, completion: Ids, shown: int) -> Reply:
    """`shown`: how many characters of the reply the client saw."""
    ids = completion[:-1] if int(completion[-1]) in tokenizer.all_special_ids else completion
    text = decode(tokenizer, ids)
    return Reply(ids, text, text[:shown])


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]], replies: Sequence[Reply]) -> list[int]:
    """The chat template's ids. An assistant's message that is a reply of ours, word for word, keeps its ids.

    Only where that changes nothing but the ids: the template must pass replies on as they are, and the text of the
    whole prompt must stay the same.
    """
    text = _rendered(tokenizer, messages)
    ids = encode(tokenizer, text)
    sampled = {reply.text: reply.ids for reply in replies}  # of two alike, the later
    ours = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m["content"] in sampled]
    if not ours:
        return ids
    marks = {n: f"\ue000{n}\ue001" for n in ours}  # private-use characters: no text has them
    marked = [{**m, "content": marks[n]} if n in marks else m for n, m in enumerate(messages)]
    rest = _rendered(tokenizer, marked)
    spliced: list[int] = []
    again = ""
    for n in ours:
        before, mark, rest = rest.partition(marks[n])
        if not mark:
            return ids
        spliced += encode(tokenizer, before) + sampled[messages[n]["content"]].tolist()
        again += before + messages[n]["content"]
    spliced += encode(tokenizer, rest)
    if again + rest != text or decode(tokenizer, spliced) != decode(tokenizer, ids):
        return ids
    return spliced


def drift(tokenizer: Any, prompt: Sequence[int], replies: Sequence[Reply]) -> History:
    """Which replies this prompt repeats, and where one came back as other ids than were sampled."""
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


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def _first_difference(tokenizer: Any, prompt: Sequence[int], at: int, sampled: Ids, length: int) -> int | None:
    """The first position at which the text from character `at` on is not read as it was sampled."""
    start = bisect_right(range(len(prompt) + 1), at, key=lambda n: len(decode(tokenizer, prompt[:n]))) - 1
    if len(decode(tokenizer, prompt[:start])) < at:
        return start  # one token holds the last character before the reply and its first
    same = 0
    while same < min(len(sampled), len(prompt) - start) and sampled[same] == prompt[start + same]:
        same += 1
    return None if len(decode(tokenizer, sampled[:same])) >= length else start + same


def _contains(data: bytes, part: bytes) -> bool:
    at = data.find(part)
    while at >= 0 and at % 4:  # bytes of two neighbouring ids
        at = data.find(part, at + 1)
    return at >= 0


def _list(ids: Sequence[int] | Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
