"""Builds an index from a corpus. The index folder appears only when it is complete."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

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
    with _new_folder(Path(output)) as folder:
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
        with open(corpus, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        versions = {"memopd": __version__, **versions}
        info = IndexInfo(kind, count, passages.skipped, Path(corpus).name, digest, settings, versions)
        write_info(folder, info)
    return info


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, and rename it to `path` if the block succeeds."""
    if path.exists():
        raise ValueError(f"{path}: already exists; remove it first or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
