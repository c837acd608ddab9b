"""Measures the compiler: tokens per second on one core, growth with the number of calls, memory."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.shapes import Shape, rewriting
from memopd.compile import Packed, compile_calls
from memopd.types import Call


@dataclass(frozen=True, slots=True)
class CompileResult:
    episodes: int
    calls: int
    tokens: int
    rows: int
    seconds: float  # CPU time, the best of several runs, since the rest is noise of the machine
    tokens_per_second: float
    memory: float  # peak above the input, in multiples of the input's bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_compile(episodes: int, calls: int, repeats: int = 5) -> tuple[CompileResult, CompileResult]:
    """Compile MEM1-like episodes (|q| 500, |x_t| 350, |a_t| 150, about 1,000 tokens per call), and ten times as many.

    The time of the smaller set is the mean over the ten parts of the larger one, so that both measurements process the
    same tokens for about as long, under the same conditions. Packs are kept, as a trainer keeps them.
    """
    rng = np.random.default_rng(0)
    shape = Shape(calls=calls, trajectories=1, q=500, x=350, a=150)
    parts = [[c for i in range(episodes) for c in rewriting(rng, str(i), shape).calls] for _ in range(10)]
    whole = [c for part in parts for c in part]
    part_times, whole_times = [], []
    for _ in range(repeats):
        kept: list[Packed] = []
        part_times.append(sum(_seconds(part, kept) for part in parts))
        whole_times.append(_seconds(whole, kept))
    return _result(episodes, parts[0], min(part_times) / 10), _result(10 * episodes, whole, min(whole_times))


def _seconds(calls: list[Call], kept: list[Packed]) -> float:
    start = time.process_time()
    kept.append(compile_calls(calls))
    return time.process_time() - start


def _result(episodes: int, calls: list[Call], seconds: float) -> CompileResult:
    tokens = sum(len(c.prompt) + len(c.completion) for c in calls)
    size = sum(c.prompt.nbytes + c.completion.nbytes for c in calls)
    tracemalloc.start()
    rows = len(compile_calls(calls))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return CompileResult(episodes, len(calls), tokens, rows, seconds, tokens / seconds, peak / size)
