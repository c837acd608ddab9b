"""Measures retrieval (latency, queries per second, recall), and bm25s on the same corpus."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.corpus import Asked, read_questions, write_synthetic
from memopd.retrieval import Index, build_index, open_index, read_corpus

_K = 10
_CLIENTS = 32
_Search = Callable[[list[str]], list[list[str]]]  # ids


@dataclass(frozen=True, slots=True)
class RetrievalResult:
    retriever: str
    passages: int
    queries: int
    build_seconds: float  # NaN if another arm built the index
    disk_bytes: int
    p50: float  # seconds of wall time: one query at a time, or the wait of one of 32 clients
    p99: float
    cpu: float  # seconds of CPU per query, one at a time; NaN if in another process
    queries_per_second: float  # all queries in one request, or from 32 clients
    recall_3: float  # NaN if the right passages are not known
    recall_5: float
    recall_10: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_retrieval(
    corpus: Path | None = None, questions: Path | None = None, passages: int = 100_000, queries: int = 1000
) -> Iterator[RetrievalResult]:
    """Use your own corpus and questions in FlashRAG's format with `metadata.supporting_ids`, or a synthetic corpus."""
    if (corpus is None) != (questions is None):
        raise ValueError("give a corpus and questions, or neither for a synthetic corpus")
    with TemporaryDirectory(prefix="memopd-bench-") as scratch:
        folder = Path(scratch)
        if corpus is None or questions is None:
            corpus = folder / "corpus.jsonl"
            asked = write_synthetic(corpus, passages, queries)
        else:
            asked = read_questions(questions)[:queries]
        yield from (arm(corpus, asked, folder) for arm in (_memopd, _service, _bm25s))


def _memopd(corpus: Path, asked: Sequence[Asked], folder: Path) -> RetrievalResult:
    start = time.perf_counter()
    info = build_index(corpus, folder / "index", skip_bad=True)
    built = time.perf_counter() - start
    index = open_index(folder / "index")

    def search(queries: list[str]) -> list[list[str]]:
        return [[hit.passage.id for hit in hits] for hits in index.search(queries, _K)]

    return _measured("memopd", info.passages, built, _size(folder / "index"), search, asked)


def _bm25s(corpus: Path, asked: Sequence[Asked], folder: Path) -> RetrievalResult:
    """bm25s with English stop words and stems, otherwise with its defaults, and with stored passages like our index."""
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    quiet = {"show_progress": False}

    def words(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, **quiet)

    start = time.perf_counter()
    documents = [{"id": p.id, "text": p.contents} for p in read_corpus(corpus, skip_bad=True)]
    index = bm25s.BM25()
    index.index(words([d["text"] for d in documents]), **quiet)
    index.save(folder / "bm25s", corpus=documents, **quiet)
    built = time.perf_counter() - start

    def search(queries: list[str]) -> list[list[str]]:
        threads = (cpu_count() or 1) if len(queries) > 1 else 0
        found = index.retrieve(words(queries), documents, _K, n_threads=threads, return_as="documents", **quiet)
        return [[document["id"] for document in row] for row in found]

    return _measured("bm25s", len(documents), built, _size(folder / "bm25s"), search, asked)


def _measured(
    name: str, passages: int, built: float, size: int, search: _Search, asked: Sequence[Asked]
) -> RetrievalResult:
    queries = [a.query for a in asked]
    found = search(queries)  # also loads the index into memory
    start = time.perf_counter()
    search(queries)
    rate = len(queries) / (time.perf_counter() - start)
    waits, cpu = [], time.process_time()
    for query in queries:
        start = time.perf_counter()
        search([query])
        waits.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / len(queries)
    p50, p99 = np.percentile(waits, [50, 99])
    recall = [_recall(found, asked, k) for k in (3, 5, 10)]
    return RetrievalResult(name, passages, len(queries), built, size, float(p50), float(p99), cpu, rate, *recall)


def _service(corpus: Path, asked: Sequence[Asked], folder: Path) -> RetrievalResult:
    """The index that `_memopd` built, over HTTP. Every client sends its next query after the last answer."""
    del corpus
    with _serving(folder / "index") as (url, passages), ThreadPoolExecutor(_CLIENTS) as pool:
        clients = [open_index(url) for _ in range(_CLIENTS)]
        list(pool.map(lambda client: client.search([asked[0].query], _K), clients))  # opens the connections
        start = time.perf_counter()
        parts = list(pool.map(_waits, clients, [asked[i::_CLIENTS] for i in range(_CLIENTS)]))
        rate = len(asked) / (time.perf_counter() - start)
    answers = [answer for part in parts for answer in part]
    p50, p99 = np.percentile([wait for *_, wait in answers], [50, 99])
    recall = [_recall([ids for _, ids, _ in answers], [one for one, *_ in answers], k) for k in (3, 5, 10)]
    none = float("nan")
    size = _size(folder / "index")
    name = f"memopd service, {_CLIENTS} clients"
    return RetrievalResult(name, passages, len(asked), none, size, float(p50), float(p99), none, rate, *recall)


def _waits(client: Index, asked: Sequence[Asked]) -> list[tuple[Asked, list[str], float]]:
    answers = []
    for one in asked:
        start = time.perf_counter()
        (hits,) = client.search([one.query], _K)
        answers.append((one, [hit.passage.id for hit in hits], time.perf_counter() - start))
    return answers


@contextmanager
def _serving(index: Path) -> Iterator[tuple[str, int]]:
    """Start the service in its own process, as in use. Yield its URL and the number of passages that it prints."""
    command = [sys.executable, "-m", "memopd.cli", "serve", "retrieval", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url, _, rest = process.stdout.readline().partition(": ")
            yield url, int(rest.split()[0].replace(",", ""))
        finally:
            process.terminate()


def _recall(found: Sequence[Sequence[str]], asked: Sequence[Asked], k: int) -> float:
    """The share of a query's passages among its first k, averaged over the queries."""
    shares = [len(a.wanted & set(ids[:k])) / len(a.wanted) for a, ids in zip(asked, found, strict=True) if a.wanted]
    return sum(shares) / len(shares) if shares else float("nan")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
