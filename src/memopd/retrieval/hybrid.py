"""Lexical and dense retrieval together, by reciprocal rank fusion (Cormack et al., 2009).

A passage scores 1 / (60 + its rank) in each of the two lists that it is in, and the sum orders the answer. Ranks need
no weights between scores that cannot be compared. Each list has 100 passages however many are asked for, so a shorter
answer is the beginning of a longer one.

    lexical/   dense/   two complete indexes of the same corpus
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from memopd.retrieval.corpus import Corpus, Passage
from memopd.retrieval.dense import DenseIndex, write_dense
from memopd.retrieval.index import Hit, IndexInfo, check_k, write_info
from memopd.retrieval.lexical import LexicalIndex, write_lexical

CONSTANT = 60  # the paper's: the larger it is, the less the first ranks count
DEPTH = 100  # passages of each list


def write_hybrid(
    folder: Path,
    passages: Corpus,
    model: str,
    prefixes: tuple[str | None, str | None],
    track: Callable[[str, Iterable[Any]], Iterable[Any]],
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Write both indexes. Return the number of passages, the settings and the versions."""
    lexical, dense = folder / "lexical", folder / "dense"
    lexical.mkdir()
    dense.mkdir()
    count, words, versions = write_lexical(lexical, track("passages, lexical", passages))
    _, vectors, more = write_dense(dense, track("passages, dense", passages), model, prefixes)
    write_info(dense, IndexInfo("dense", count, passages.skipped, passages.path.name, "", vectors, more))
    fusion = {"fusion": "reciprocal rank", "constant": CONSTANT, "depth": DEPTH}
    return count, {**fusion, **words, **vectors}, {**versions, **more}


class HybridIndex:
    """An index that `write_hybrid` wrote. Several threads may search at once; embedding takes one at a time."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        self._lexical = LexicalIndex(folder / "lexical")
        self._dense = DenseIndex(folder / "dense", model)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        lists = (self._lexical.search(queries, DEPTH), self._dense.search(queries, DEPTH)) if queries else ((), ())
        return [fuse(both)[:k] for both in zip(*lists, strict=True)]

    def passages(self, ids: Iterable[str]) -> dict[str, Passage]:
        return self._lexical.passages(ids)


def fuse(rankings: Iterable[Sequence[Hit]]) -> list[Hit]:
    """Merge rankings. Each hit of the result has its fused score; equal scores are ordered by passage id.

    >>> a, b = Passage("a", "", ""), Passage("b", "", "")
    >>> [(hit.passage.id, round(hit.score, 4)) for hit in fuse([[Hit(a, 9.0), Hit(b, 8.0)], [Hit(b, 0.7)]])]
    [('b', 0.0325), ('a', 0.0164)]
    """
    scores: dict[str, float] = {}
    passages: dict[str, Passage] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            passages[hit.passage.id] = hit.passage
            scores[hit.passage.id] = scores.get(hit.passage.id, 0.0) + 1 / (CONSTANT + rank)
    return [Hit(passages[id], score) for id, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))]
