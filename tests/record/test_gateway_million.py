"""A million calls: into the journal, back out of it at a restart, into the store, and back out of that."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memopd.record import read_episodes
from memopd.record.gateway_episodes import Ledger, Recorded
from memopd.types import Call, Sampling, StopReason

CALLS, TURNS, SESSIONS = 1_000_000, 20, 64
PROMPT, COMPLETION = 200, 40

rng = np.random.default_rng(0)
PROMPTS = rng.integers(0, 150_000, (997, PROMPT), np.int32)
COMPLETIONS = rng.integers(0, 150_000, (991, COMPLETION), np.int32)
LOGPROBS = -rng.random((983, COMPLETION))


def call(number: int) -> Call:
    prompt = PROMPTS[number % 997].copy()
    prompt[0] = number
    return Call(prompt, COMPLETIONS[number % 991], LOGPROBS[number % 983], StopReason.STOP)


def write(ledger: Ledger, calls: int) -> None:
    """As 64 sessions do: each waits for its own call, then makes the next."""
    waiting = []
    for number in range(calls):
        name = f"episode-{number // TURNS:06d}"
        recorded = Recorded(name, number, call(number), Sampling(max_tokens=COMPLETION), None, 0.0, 0.0)
        waiting.append(ledger.add(recorded))
        if number % TURNS == TURNS - 1:
            waiting.append(ledger.finish(name, float(number % 2)))
        if len(waiting) >= SESSIONS:
            for future in waiting:
                future.result(60)
            waiting.clear()
    for future in waiting:
        future.result(60)


class Clock:
    def __init__(self, calls: int) -> None:
        self.calls, self.rates = calls, {}

    def __call__(self, what: str, begun: float) -> None:
        self.rates[what] = self.calls / (time.perf_counter() - begun)

    def __str__(self) -> str:
        return ", ".join(f"{what} {rate:,.0f} calls/s" for what, rate in self.rates.items())


def size(files: Iterator[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB"


def round_trip(store: Path, calls: int) -> str:
    clock = Clock(calls)
    ledger = Ledger(store)
    begun = time.perf_counter()
    write(ledger, calls)
    clock("journal", begun)
    ledger.close()
    del ledger  # its episodes are read again
    journal = size(store.glob("journal/*"))

    begun = time.perf_counter()
    ledger = Ledger(store)
    clock("restart", begun)
    assert ledger.waiting == calls // TURNS
    begun = time.perf_counter()
    assert ledger.compact() == calls // TURNS
    clock("compaction", begun)
    ledger.close()
    assert sum(file.stat().st_size for file in store.glob("journal/*")) < 100e6

    begun = time.perf_counter()
    number = 0
    for episode in read_episodes(store):
        assert episode.id == f"episode-{number // TURNS:06d}"
        for recorded in episode.calls:
            expected = call(number)
            assert np.array_equal(recorded.prompt, expected.prompt)
            assert np.array_equal(recorded.completion, expected.completion)
            assert np.array_equal(recorded.logprobs, expected.logprobs)
            number += 1
        assert episode.reward == float((number - 1) % 2)
    clock("store read and compared", begun)
    assert number == calls

    begun = time.perf_counter()
    ledger = Ledger(store)
    assert ledger.counts == (0, calls // TURNS)
    clock("start on a full store", begun)
    ledger.close()
    sizes = f"journal {journal}, store {size(store.glob('*.parquet'))}"
    return f"{calls} calls of {PROMPT} + {COMPLETION} ids: {clock}; {sizes}"


def test_the_round_trip_in_small(tmp_path):
    print(round_trip(tmp_path / "store", 4000))


@pytest.mark.slow
def test_a_million_calls(tmp_path):
    if shutil.disk_usage(tmp_path).free < 10e9:
        pytest.skip("needs 10 GB of disk")
    print(round_trip(tmp_path / "store", CALLS))
    shutil.rmtree(tmp_path / "store")
