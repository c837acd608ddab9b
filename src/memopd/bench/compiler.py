"""The compiler: tokens per second on one core, growth with the number of calls, memory."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Any

from memopd.bench.shapes import Shape, rewriting
from memopd.compile import compile_calls
from memopd.types import Call


@dataclass(frozen=True, slots=True)
class CompileResult:
    episodes: int
    calls: int
    tokens: int
    rows: int
    seconds: float  # CPU, best of several: the rest is noise of the machine
    tokens_per_second: float
    memory: float  # peak above the input, in multiples of the input's bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_compile(episodes: int, calls: int, repeats: int = 5) -> CompileResult:
    """MEM1-like episodes: |q| 500, |x_t| 350, |a_t| 150, about 1,000 tokens a call."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = Shape(calls=calls, trajectories=1, q=500, x=350, a=150)
    made: list[Call] = [c for i in range(episodes) for c in rewriting(rng, str(i), shape).calls]
    tokens = sum(len(c.prompt) + len(c.completion) for c in made)
    size = sum(c.prompt.nbytes + c.completion.nbytes for c in made)
    times, rows = [], 0
    for _ in range(repeats):
        start = time.process_time()
        rows = len(compile_calls(made))
        times.append(time.process_time() - start)
    tracemalloc.start()
    compile_calls(made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    best = min(times)
    return CompileResult(episodes, len(made), tokens, rows, best, tokens / best, peak / size)
