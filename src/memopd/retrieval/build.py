"""Builds an index from a corpus. The index folder appears only when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memopd.files import digest, whole_folder
from memopd.retrieval.corpus import read_corpus
from memopd.retrieval.index import IndexInfo, write_info

Track = Callable[[str, Iterable[Any]], Iterable[Any]]  # wraps an iterable to show progress


def build_index(
    corpus: Path | str,
    output: Path | str,
    kind: str = "lexical",
    model: str | None = None,
    skip_bad: bool = False,
    track: Track = lambda _, items: items,
) -> IndexInfo:
    """Build an index in the new folder `output`. A dense one needs an embedding `model`: a folder or a hub name."""
    if kind not in ("lexical", "dense"):
        raise ValueError(f"kind must be lexical or dense, got {kind!r}")
    if (kind == "dense") != (model is not None):
        raise ValueError("a dense index needs an embedding model (--model), a lexical one takes none")
    passages = read_corpus(corpus, skip_bad)
    with whole_folder(Path(output), replace=False) as folder:
        if kind == "dense":
            from memopd.retrieval.dense import write_dense

            assert model is not None
            count, settings, versions = write_dense(folder, track("passages", passages), model)
        else:
            from memopd.retrieval.lexical import write_lexical

            count, settings, versions = write_lexical(folder, track("passages", passages))
        if count == 0:
            raise ValueError(f"{corpus}: contains no passages")
        corpus, versions = Path(corpus), {"memopd": version("memopd"), **versions}
        info = IndexInfo(kind, count, passages.skipped, corpus.name, digest(corpus), settings, versions)
        write_info(folder, info)
    return info
