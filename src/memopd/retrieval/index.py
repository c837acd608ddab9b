"""The interface of an index, which finds the k best passages for each query, and the file that describes an index.

    Index ── search ──> Hit ── passage ──> Passage
                         └── score

Every kind of index orders equal scores by passage id, so that answers do not depend on how an index was built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from memopd.files import check_digests
from memopd.retrieval.corpus import Passage

KINDS = ("lexical", "dense", "hybrid")
MAX_QUERY = 4096  # characters

INFO = "memopd-index.json"  # in every index folder


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float


class Index(Protocol):
    """Finds passages. There is one answer per query, in the order of the queries; it may be an empty list.

    Any text is a valid query. Only the first MAX_QUERY characters are used, since a model may write anything.
    """

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...


def passages_of(index: Index, ids: Iterable[str]) -> dict[str, Passage]:
    """Look up passages by id, as far as the index has them. Search-R1's protocol cannot do this, so a folder must."""
    lookup = getattr(index, "passages", None)
    if lookup is None:
        raise ValueError("gold passages are looked up by id, which a retrieval service cannot do: give an index folder")
    found: dict[str, Passage] = lookup(ids)
    return found


def is_service(where: Path | str) -> bool:
    """Whether it is the URL of a retrieval service, and no folder."""
    return str(where).startswith(("http://", "https://"))


def open_index(where: Path | str, model: str | None = None) -> Index:
    """Open an index folder, or with http(s):// a service that uses Search-R1's protocol.

    `model` is the embedding model of a dense or hybrid index, if it has moved since the index was built.
    """
    if is_service(where):
        from memopd.retrieval.client import RemoteIndex

        return RemoteIndex(str(where))
    folder = Path(where)
    info = read_info(folder)
    check_digests(folder)  # a flipped bit would give other passages, and seldom an error
    if info.kind == "dense":
        from memopd.retrieval.dense import DenseIndex

        return DenseIndex(folder, model)
    if info.kind == "hybrid":
        from memopd.retrieval.hybrid import HybridIndex

        return HybridIndex(folder, model)
    from memopd.retrieval.lexical import LexicalIndex

    return LexicalIndex(folder)


def readable(query: str) -> str:
    """The part of a query that is used, in characters that every index can encode."""
    return query[:MAX_QUERY].encode("utf-8", "replace").decode()


def check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}")


# ---- the description of an index folder ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexInfo:
    kind: str  # one of KINDS
    passages: int
    skipped: int  # rows of the corpus that were skipped
    corpus: str  # its file name
    corpus_sha256: str  # of the file as it was on disk
    settings: dict[str, Any]  # everything besides the corpus that affects the answers
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_info(folder: Path, info: IndexInfo) -> None:
    (folder / INFO).write_text(json.dumps(info.as_dict(), indent=2) + "\n")


def read_info(folder: Path) -> IndexInfo:
    path = folder / INFO
    if not path.is_file():
        what = "not an index" if folder.exists() else "no such folder"
        raise ValueError(f"{folder}: {what}; make one with `memopd index build CORPUS -o {folder}`")
    try:
        info = IndexInfo(**json.loads(path.read_text()))
    except (TypeError, ValueError) as why:
        raise ValueError(f"{path}: damaged ({why}); build the index again") from None
    if info.kind not in KINDS:
        raise ValueError(f"{path}: kind: must be {' or '.join(KINDS)}, got {info.kind!r}; build the index again")
    return info
