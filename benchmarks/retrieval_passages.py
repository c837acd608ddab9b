"""Passages and queries in any number, with word frequencies like those of an encyclopedia."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from memopd.retrieval import Passage

_WORDS = 1_000_000
_SHIFT = 15  # Zipf–Mandelbrot: ranks 1, 5 and 25 stand in 31, 25 and 13 % of passages; of real ones in 41, 22 and 12 %
_LENGTH = 60  # words that count; 40 stop words make it wiki-18's 100
_TITLE = 2
_BATCH = 10_000


def synthetic_passages(count: int, seed: int = 0) -> Iterator[Passage]:
    """Ids are numbers as wiki-18 has them, so that their order as strings is not the order of the corpus."""
    rng = np.random.default_rng(seed)
    weights = 1 / (np.arange(_WORDS) + _SHIFT)
    ladder = np.cumsum(weights) / weights.sum()
    for start in range(0, count, _BATCH):
        drawn = np.searchsorted(ladder[:-1], rng.random((min(_BATCH, count - start), _TITLE + _LENGTH)))
        known, places = np.unique(drawn, return_inverse=True)
        rows = np.array([_word(int(number)) for number in known], dtype=object)[places.reshape(drawn.shape)]
        rows[:, _TITLE::3] += " of the"  # the rest of the 100
        for i, row in enumerate(rows, start):
            yield Passage(str(i), " ".join(row[:_TITLE]), " ".join(row[_TITLE:]) + ".")


def query_about(passage: Passage, rng: np.random.Generator, words: int = 8) -> str:
    """Words of the passage, as a question about it has them."""
    told = [word for word in f"{passage.title} {passage.text}".split() if word not in ("of", "the")]
    return " ".join(rng.permutation(told)[:words])


@cache
def _word(number: int) -> str:
    """Two to four syllables, another word for every number."""
    syllables = []
    number += 70
    while number:
        number, digit = divmod(number, 70)
        syllables.append("bdfgklmnprstvz"[digit % 14] + "aeiou"[digit // 14])
    return "".join(syllables)
