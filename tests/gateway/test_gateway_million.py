"""A million calls: into the journal, back out of it at a restart, into the store, and back out of that."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memopd.gateway.episodes import Ledger, Recorded
from memopd.record import read_episodes
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
    """Calls a second, and the CPU time of one: on a busy machine the first says little."""

    def __init__(self, calls: int) -> None:
        self.calls, self.parts = calls, []
        self.start()

    def start(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def stop(self, what: str) -> None:
        wall, busy = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
        self.parts.append(f"{what} {self.calls / wall:,.0f} calls/s ({1e6 * busy / self.calls:.0f} us)")

    def __str__(self) -> str:
        return ", ".join(self.parts)


def size(files: Iterator[Path]) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1e9:.2f} GB"


def round_trip(store: Path, calls: int) -> str:
    clock = Clock(calls)
    ledger = Ledger(store)
    clock.start()
    write(ledger, calls)
    clock.stop("journal")
    ledger.close()
    del ledger  # its episodes are read again
    journal = size(store.glob("journal/*"))

    clock.start()
    ledger = Ledger(store)
    clock.stop("restart")
    assert ledger.waiting == calls // TURNS
    clock.start()
    assert ledger.compact() == calls // TURNS
    clock.stop("compaction")
    ledger.close()
    assert sum(file.stat().st_size for file in store.glob("journal/*")) < 100e6

    clock.start()
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
    clock.stop("store read and compared")
    assert number == calls

    clock.start()
    ledger = Ledger(store)
    assert ledger.counts == (0, calls // TURNS)
    clock.stop("start on a full store")
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
