"""Retrieval by embedding, with a sentence-transformers model and faiss.

Queries and passages begin with the prefixes that the model was trained with: those that it defines itself (`prompts`),
or E5's `query: ` and `passage: ` for a model with e5 in its name, or none. Texts are cut to 256 tokens. Pooling is the
model's own (the mean for folders that do not define one), and vectors have length 1. The index is flat: all inner
products are exact.

    vectors.faiss    row i is the vector of passage i
    passages.jsonl   line i is passage i
    offsets.npy      the offset of line i, so that a passage can be read without the rest
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memopd.retrieval.corpus import Passage
from memopd.retrieval.index import Hit, check_k, read_info, readable
from memopd.types import Floats

Vectors: TypeAlias = NDArray[np.float32]

_E5 = ("query: ", "passage: ")
_TOKENS = 256
_BATCH = 64
_CHUNK = 64 * _BATCH  # passages encoded at once, so that batches of similar length waste less padding
_TIE = 1e-6  # closer scores count as equal: padding changes a unit vector by about 1e-7


def write_dense(
    folder: Path, passages: Iterable[Passage], model: str, prefixes: tuple[str | None, str | None] = (None, None)
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Write an index. Return the number of passages, the settings and the versions.

    `prefixes` are those of queries and of passages, in place of the model's own.
    """
    import faiss
    import sentence_transformers

    encoder = _load(model)
    query, prefix = (g if g is not None else own for g, own in zip(prefixes, _own(encoder, model), strict=True))
    index = faiss.IndexFlatIP(_width(encoder))
    offsets = [0]
    with (folder / "passages.jsonl").open("wb") as file:
        for chunk in _chunks(passages):
            index.add(_encode(encoder, [prefix + passage.contents for passage in chunk]))
            for passage in chunk:
                line = json.dumps([passage.id, passage.title, passage.text], ensure_ascii=False).encode() + b"\n"
                offsets.append(offsets[-1] + file.write(line))
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    try:
        faiss.write_index(index, str(folder / "vectors.faiss"))
    except RuntimeError as error:  # faiss wraps system errors
        raise OSError(f"{folder.name}: the index cannot be written ({error}): is the disk full?") from error
    where = str(Path(model).resolve()) if Path(model).exists() else model
    settings = {"model": where, "width": index.d, "tokens": _TOKENS, "query": query, "passage": prefix}
    versions = {"faiss": faiss.__version__, "sentence-transformers": sentence_transformers.__version__}
    return index.ntotal, settings, versions


class DenseIndex:
    """An index that `write_dense` wrote. Several threads may search; a lock serves one at a time."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        import faiss

        settings = read_info(folder).settings
        built_with = str(settings["model"])
        if model is None and built_with.startswith("/") and not Path(built_with).is_dir():
            raise ValueError(
                f"{folder}: its embedding model was in {built_with}, where it is no more: put it back, or name where "
                "it is with `memopd serve retrieval --model` and use that service"
            )
        model = model or built_with
        self._query, self._prefix = settings["query"], settings["passage"]
        try:
            self._index = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP)
            self._offsets = np.load(folder / "offsets.npy")
            self._file = (folder / "passages.jsonl").open("rb")
        except (OSError, ValueError, EOFError, RuntimeError) as why:  # faiss raises RuntimeError for a damaged file
            raise ValueError(f"{folder}: cannot be opened ({_line(why)}); build the index again") from None
        self._encoder = _load(model)
        self._lock = Lock()  # tokenizers change their own state while they encode
        self._check(model)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        if not queries:
            return []
        with self._lock:
            vectors = _encode(self._encoder, [self._query + readable(query) for query in queries])
            found = zip(queries, vectors, self._rows(vectors, k), strict=True)
            return [self._best(vector, rows, k) if query.strip() else [] for query, vector, rows in found]

    def passages(self, ids: Iterable[str]) -> dict[str, Passage]:
        wanted = set(ids)
        every = (self._passage(row) for row in range(self._index.ntotal)) if wanted else iter(())
        return {passage.id: passage for passage in every if passage.id in wanted}

    def _rows(self, vectors: Vectors, k: int) -> list[NDArray[np.int64]]:
        """For each vector, the k best rows and all that may tie with the last of them."""
        limit = min(k + 1, self._index.ntotal)
        while True:
            scores, rows = self._index.search(vectors, limit)
            cut = scores[:, min(k, limit) - 1] - 10 * _TIE
            if limit == self._index.ntotal or (scores[:, -1] < cut).all():
                return [row[score >= least] for row, score, least in zip(rows, scores, cut, strict=True)]
            limit = min(4 * limit, self._index.ntotal)

    def _best(self, vector: Vectors, rows: NDArray[np.int64], k: int) -> list[Hit]:
        """Order by score, then id. We score again, because faiss sums in an order that depends on the batch."""
        stored = np.stack([self._index.reconstruct(int(row)) for row in rows]).astype(np.float64)
        scores = _tied(stored @ vector)
        hits = [Hit(self._passage(int(row)), float(score)) for row, score in zip(rows, scores, strict=True)]
        return sorted(hits, key=lambda hit: (-hit.score, hit.passage.id))[:k]

    def _passage(self, row: int) -> Passage:
        begin, end = self._offsets[row], self._offsets[row + 1]
        return Passage(*json.loads(os.pread(self._file.fileno(), end - begin, begin)))

    def _check(self, model: str) -> None:
        """Check that the model gives the first passage the vector that is in the index."""
        vector = _encode(self._encoder, [self._prefix + self._passage(0).contents])[0]
        stored = self._index.reconstruct(0)
        if vector.shape != stored.shape or float(vector @ stored) < 0.99:
            raise ValueError(f"{model}: not the model that this index was built with; give that one with --model")


def embedder(model: str) -> Callable[[Sequence[str]], Vectors]:
    """A function from texts to vectors of length 1, which compares texts of one kind: all get the prefix of queries."""
    try:
        encoder = _load(model)
    except ModuleNotFoundError as missing:
        raise ValueError(f"{model}: embeddings need {missing.name}: pip install 'memopd[dense]'") from None
    prefix = _own(encoder, model)[0]
    return lambda texts: _encode(encoder, [prefix + readable(text) for text in texts])


def _tied(scores: Floats) -> Floats:
    """Give scores that are connected by steps of at most _TIE the same value, the best of them."""
    order = np.argsort(-scores)
    falling = scores[order]
    heads = np.r_[True, falling[:-1] - falling[1:] > _TIE]
    tied = np.empty_like(scores)
    tied[order] = falling[heads][np.cumsum(heads) - 1]
    return tied


def _load(model: str) -> Any:
    from sentence_transformers import SentenceTransformer

    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(f"{model}: no such folder; name an embedding model of sentence-transformers")
    try:
        encoder = SentenceTransformer(os.path.expanduser(model), model_kwargs={"use_safetensors": True})
    except (OSError, ValueError) as why:
        raise ValueError(f"{model}: cannot load an embedding model from there ({_line(why)})") from None
    encoder.max_seq_length = min(_TOKENS, encoder.max_seq_length or _TOKENS)
    return encoder


def _own(encoder: Any, model: str) -> tuple[str, str]:
    """The prefixes of a model for queries and for passages."""
    prompts = getattr(encoder, "prompts", None) or {}
    query, passage = prompts.get("query") or "", prompts.get("passage") or prompts.get("document") or ""
    if query or passage:
        return query, passage
    return _E5 if re.search(r"\be5\b|_e5", Path(model).name.lower()) else ("", "")


def _width(encoder: Any) -> int:
    return _encode(encoder, ["width"]).shape[1]


def _encode(encoder: Any, texts: list[str]) -> Vectors:
    # The prefixes are in the texts, so no default prompt of the model may be added.
    return encoder.encode(texts, prompt="", batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False)


def _chunks(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    rest = iter(passages)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
