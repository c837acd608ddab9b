"""Builds an index from a corpus. The index folder appears only when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memopd.files import digest, whole_folder, write_digests
from memopd.retrieval.corpus import read_corpus
from memopd.retrieval.index import KINDS, IndexInfo, write_info
from memopd.version import __version__

Track = Callable[[str, Iterable[Any]], Iterable[Any]]  # wraps an iterable to show progress


def build_index(
    corpus: Path | str,
    output: Path | str,
    kind: str = "lexical",
    model: str | None = None,
    skip_bad: bool = False,
    track: Track = lambda _, items: items,
    prefixes: tuple[str | None, str | None] = (None, None),
) -> IndexInfo:
    """Build an index in the new folder `output`.

    A dense or hybrid one needs an embedding `model`: a folder or a hub name. `prefixes` replace the texts that it puts
    before queries and before passages.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be {' or '.join(KINDS)}, got {kind!r}")
    if (kind == "lexical") != (model is None):
        raise ValueError("a dense or hybrid index needs an embedding model (--model), a lexical one takes none")
    if kind == "lexical" and prefixes != (None, None):
        raise ValueError("a lexical index has no prefixes (--query-prefix, --passage-prefix): they are for a model")
    passages = read_corpus(corpus, skip_bad)
    with whole_folder(Path(output), replace=False) as folder:
        if kind == "lexical":
            from memopd.retrieval.lexical import write_lexical

            count, settings, versions = write_lexical(folder, track("passages", passages))
        elif kind == "dense":
            from memopd.retrieval.dense import write_dense

            assert model is not None
            count, settings, versions = write_dense(folder, track("passages", passages), model, prefixes)
        else:
            from memopd.retrieval.hybrid import write_hybrid

            assert model is not None
            count, settings, versions = write_hybrid(folder, passages, model, prefixes, track)
        if count == 0:
            raise ValueError(f"{corpus}: contains no passages")
        corpus, versions = Path(corpus), {"memopd": __version__, **versions}
        info = IndexInfo(kind, count, passages.skipped, corpus.name, digest(corpus), settings, versions)
        write_info(folder, info)
        write_digests(folder)
    return info
