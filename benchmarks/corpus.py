"""A synthetic corpus of any size, with word frequencies like those of an encyclopedia, and queries about it; or your
own questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from memopd.files import json_lines
from memopd.retrieval import Passage, write_corpus

_WORDS = 1_000_000
_SHIFT = 15  # Zipf–Mandelbrot: ranks 1, 5 and 25 occur in 31, 25 and 13 % of passages; in real ones, 41, 22 and 12 %
_LENGTH = 60  # words without the 40 stop words that complete wiki-18's 100
_TITLE = 2
_BATCH = 10_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A query, and the ids of the passages that contain its answer, if known."""

    query: str
    wanted: frozenset[str] = frozenset()


def write_synthetic(path: Path, passages: int, queries: int) -> list[Asked]:
    """Write a corpus to `path`, and return queries about passages all over it."""
    rng = np.random.default_rng(1)
    asked: list[Asked] = []

    def with_queries() -> Iterator[Passage]:
        for i, passage in enumerate(synthetic_passages(passages)):
            if i * queries // passages >= len(asked):
                asked.append(Asked(query_about(passage, rng), frozenset([passage.id])))
            yield passage

    write_corpus(path, with_queries())
    return asked


def read_questions(path: Path) -> list[Asked]:
    return [Asked(row["question"], frozenset(row["metadata"]["supporting_ids"])) for _, row in json_lines(path)]


def synthetic_passages(count: int, seed: int = 0) -> Iterator[Passage]:
    """Make passages. Their ids are numbers as in wiki-18, so their order as strings is not that of the corpus."""
    rng = np.random.default_rng(seed)
    weights = 1 / (np.arange(_WORDS) + _SHIFT)
    ladder = np.cumsum(weights) / weights.sum()
    for start in range(0, count, _BATCH):
        drawn = np.searchsorted(ladder[:-1], rng.random((min(_BATCH, count - start), _TITLE + _LENGTH)))
        known, places = np.unique(drawn, return_inverse=True)
        rows = np.array([_word(int(number)) for number in known], dtype=object)[places.reshape(drawn.shape)]
        rows[:, _TITLE::3] += " of the"  # the stop words
        for i, row in enumerate(rows, start):
            yield Passage(str(i), " ".join(row[:_TITLE]), " ".join(row[_TITLE:]) + ".")


def query_about(passage: Passage, rng: np.random.Generator, words: int = 8) -> str:
    """Random words of the passage, as a question about it would contain."""
    words_of_passage = [word for word in f"{passage.title} {passage.text}".split() if word not in ("of", "the")]
    return " ".join(rng.permutation(words_of_passage)[:words])


@cache
def _word(number: int) -> str:
    """A word of two to four syllables, different for every number."""
    syllables = []
    number += 70
    while number:
        number, digit = divmod(number, 70)
        syllables.append("bdfgklmnprstvz"[digit % 14] + "aeiou"[digit // 14])
    return "".join(syllables)
