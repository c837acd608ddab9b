"""Measures time and memory, on a CPU or a GPU. Compare only numbers of the same run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float  # median after warm-up
    spread: float  # (slowest − fastest) / median
    peak_bytes: int  # the peak of allocated memory; 0 on a CPU
    added_bytes: int  # the part of it that was not allocated before


def measure(
    work: Callable[[], Any], repeats: int = 5, warmup: int = 2, fresh: Callable[[], None] = lambda: None
) -> Measured:
    """Time `work`. `fresh` runs before each repetition, untimed, to free what the last one left behind."""
    cuda = torch.cuda.is_available()
    for _ in range(warmup):
        fresh()
        work()
    fresh()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        fresh()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Measured(median(times), (max(times) - min(times)) / median(times), peak, peak - before)


def matmul_peak(dtype: torch.dtype, device: str) -> float:
    """The FLOP/s of a large matrix product, to which utilisation is relative."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / measure(lambda: a @ b, repeats=20, warmup=5).seconds


def machine() -> dict[str, str]:
    """The machine and library versions that the numbers belong to."""
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
