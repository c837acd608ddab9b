"""Calls as agents with compact memory make them, from a seed."""

import numpy as np

from memopd.types import Call
from memopd.verify.families import VOCABULARY


def mem1_calls(seed: int, calls: int = 4, q: int = 10, a: int = 6, o: int = 7) -> list[Call]:
    """[q] → a0, [q, a0, o0] → a1, [q, a1, o1] → a2, ...: each response replaces the memory."""
    rng = np.random.default_rng(seed)
    prefix, memory, recorded = _ids(rng, q), [], []
    for t in range(calls):
        response = _ids(rng, a)
        recorded.append(Call(prefix + memory + (_ids(rng, o) if t else []), response))
        memory = response
    return recorded


def mixed_calls(seed: int) -> list[Call]:
    """Every way in which calls share: two rollouts of one task, an append-only turn, a resampled and a repeated
    call, a call of another task, one that is context only. Lengths vary; most paths are longer than a window."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return _ids(rng, int(rng.integers(low, high)))

    q, recorded = some(5, 15), []
    for _ in range(2):
        memory: list[int] = []
        for t in range(3):
            response = some(2, 9)
            recorded.append(Call(q + memory + (some(2, 9) if t else []), response))
            memory = response
    last = recorded[-1]
    recorded.append(Call([*last.prompt, *last.completion, *some(1, 5)], some(1, 6)))
    recorded.append(Call(recorded[1].prompt, some(1, 6)))
    recorded.append(Call(recorded[4].prompt, recorded[4].completion))
    recorded.append(Call(q + some(2, 9), some(2, 9), trainable=False))
    recorded.append(Call(some(14, 30), some(2, 9)))
    return recorded


def _ids(rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(3, VOCABULARY, n).tolist()
