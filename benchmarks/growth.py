"""Measures how a lexical index grows with its corpus: time, disk, memory, and the latency of a query."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.corpus import write_synthetic
from memopd.retrieval import build_index, open_index


@dataclass(frozen=True, slots=True)
class GrowthResult:
    passages: int
    corpus_bytes: int
    index_bytes: int
    build_seconds: float
    build_cpu: float  # seconds of CPU, which other work on the machine does not change
    build_memory: int  # peak resident bytes of the process that builds
    p50: float  # seconds of wall time: one query after another, each for the first time
    p99: float
    cpu: float  # seconds of CPU per query
    search_memory: int  # peak resident bytes of the process that searches, mostly cached pages of the index

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_growth(sizes: Sequence[int], queries: int = 1000, scratch: Path | None = None) -> Iterator[GrowthResult]:
    """Synthetic passages, about 550 bytes each. The corpus and the index are under `scratch` while it runs."""
    for size in sizes:
        with TemporaryDirectory(prefix="memopd-growth-", dir=scratch) as made:
            folder = Path(made)
            asked = [one.query for one in write_synthetic(folder / "corpus.jsonl", size, queries)]
            (seconds, build_cpu), build_memory = _alone(_build, folder)
            (p50, p99, cpu), search_memory = _alone(_search, folder, asked)
            index = sum(file.stat().st_size for file in (folder / "index").iterdir())
            corpus = (folder / "corpus.jsonl").stat().st_size
            yield GrowthResult(size, corpus, index, seconds, build_cpu, build_memory, p50, p99, cpu, search_memory)


def _alone(work: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Run `work` in its own process. Return its result, and the peak memory of the process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result(), pool.submit(_most_memory).result()


def _build(folder: Path) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    build_index(folder / "corpus.jsonl", folder / "index")
    return time.perf_counter() - start, time.process_time() - cpu


def _search(folder: Path, queries: list[str]) -> tuple[float, float, float]:
    index = open_index(folder / "index")
    waits, cpu = [], time.process_time()
    for query in queries:
        start = time.perf_counter()
        index.search([query], 10)
        waits.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / len(queries)
    p50, p99 = np.percentile(waits, [50, 99])
    return float(p50), float(p99), cpu


def _most_memory() -> int:
    """The peak memory since the process started its own program; getrusage would include its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
