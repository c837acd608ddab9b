"""What an index is: queries in, for each the k best passages, best first.

    Index ── search ──> Hit ── passage ──> Passage
                         └── score

Whichever kind it is, equal scores are ordered by passage id, so that answers do not depend on how an index was built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from memopd.retrieval.corpus import Passage

MAX_QUERY = 4096  # characters


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float


class Index(Protocol):
    """Anything that finds passages. One answer per query, in the order of the queries; none found: an empty list.

    Any text is a query: of a model gone wild, the first MAX_QUERY characters are read.
    """

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...


def open_index(where: Path | str, model: str | None = None) -> Index:
    """An index folder, or with http(s):// any service that speaks Search-R1's protocol.

    `model` names the embedding model of a dense index where it has moved since.
    """
    if str(where).startswith(("http://", "https://")):
        from memopd.retrieval.client import RemoteIndex

        return RemoteIndex(str(where))
    from memopd.retrieval.info import read_info

    folder = Path(where)
    info = read_info(folder)
    if info.kind == "dense":
        from memopd.retrieval.dense import DenseIndex

        return DenseIndex(folder, model)
    from memopd.retrieval.lexical import LexicalIndex

    return LexicalIndex(folder)


def readable(query: str) -> str:
    """The part of a query that is read, in characters every index can encode."""
    return query[:MAX_QUERY].encode("utf-8", "replace").decode()


def check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}")
