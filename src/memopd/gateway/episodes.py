"""The episodes that a gateway records: first call by call in the journal, then, with their reward, in the store.

    add ──> journal ──> finish ──> journal ──> compact ──> one part of the store ──> "stored" in the journal
                                                              └──> segments without unfinished episodes are deleted

The process may be killed at any time. The next one compares the journal with the store: episodes in the store are
finished, episodes with a reward in the journal are written to the store, and all others continue. A record consists of
JSON and packed arrays, because JSON lists of ids would be twice as long and slow to read:

    length of the JSON u32 | JSON, padded to a multiple of 8 | log-probabilities f64 | prompt i32 | completion i32
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memopd.gateway.drift import History
from memopd.record.journal import SEGMENT_BYTES, Journal, JournalError
from memopd.record.store import StoreError, write_episodes
from memopd.types import Call, Episode, Sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Recorded:
    """One call of an episode, and what else the journal records about it."""

    episode: str
    number: int  # the order of arrival, which is the order of an episode's calls even if they overlap
    call: Call
    sampling: Sampling
    seed: int | None  # from the client
    started: float
    ended: float
    shown: int = 0  # how many characters of the reply the client received
    history: History = field(default_factory=History)


class Ending(NamedTuple):
    """How an episode ended."""

    reward: float
    task: str | None  # None if it is unknown: in older journals, "stored" records have no tasks


@dataclass(slots=True, eq=False)
class _Unfinished:
    calls: list[Recorded] = field(default_factory=list)
    segments: Counter[int] = field(default_factory=Counter)  # its bytes in each segment of the journal
    outcome: dict[str, Any] | None = None


class Ledger:
    """The unfinished episodes of a store, in memory and in its journal. You may call the methods from any thread.

    Each unfinished episode takes 4 bytes of memory per id that the model read and 12 per id that it sampled.
    """

    def __init__(self, store: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.store = Path(store)
        if self.store.suffix == ".parquet" or self.store.is_file():
            raise ValueError(
                f"{store}: the store of a gateway must be a directory, because the gateway adds parts to it"
            )
        self._journal = Journal(self.store / "journal", segment_bytes)
        try:
            self._finished = _stored(self.store)
            self._unfinished: dict[str, _Unfinished] = {}
            self._ready: list[str] = []  # episodes with a durable reward that are not in the store yet
            self._needed: Counter[int] = Counter()  # bytes of unfinished episodes in each segment
            self._marks: Counter[int] = Counter()  # bytes of "stored" records in each segment
            self._number = 0
            self._lock, self._compacting = Lock(), Lock()
            unmarked: dict[str, Ending] = {}
            for segment, payload in self._journal.records():
                try:
                    self._replay(segment, payload, unmarked)
                except (KeyError, TypeError) as error:
                    path = self._journal.directory
                    raise JournalError(f"{path}: segment {segment}: a record of another version: {error!r}") from None
            if unmarked:
                self._mark_stored(unmarked)
        except BaseException:
            self._journal.close()
            raise

    @property
    def broken(self) -> JournalError | None:
        return self._journal.broken

    @property
    def waiting(self) -> int:
        """The number of finished episodes that are not in the store yet."""
        return len(self._ready)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of open and of finished episodes."""
        with self._lock:
            return sum(unfinished.outcome is None for unfinished in self._unfinished.values()), len(self._finished)

    def next_number(self) -> int:
        """A number for the next call."""
        with self._lock:
            self._number += 1
            return self._number - 1

    def calls(self, name: str) -> list[Recorded]:
        """The calls of an episode in the order of arrival. Empty if the episode is in the store."""
        with self._lock:
            unfinished = self._unfinished.get(name)
            return sorted(unfinished.calls, key=lambda recorded: recorded.number) if unfinished else []

    def reward(self, name: str) -> float | None:
        """The reward of a finished episode."""
        ending = self._finished.get(name)
        return ending and ending.reward

    def ending(self, name: str) -> Ending | None:
        """The reward and the task of a finished episode."""
        return self._finished.get(name)

    def add(self, recorded: Recorded) -> Future[int]:
        """Record a call. The future resolves when the call is durable."""
        payload = _packed(recorded)
        with self._lock:
            self._unfinished.setdefault(recorded.episode, _Unfinished()).calls.append(recorded)
            return self._journal.append(payload, lambda done: self._on_durable(recorded.episode, len(payload), done))

    def finish(self, name: str, reward: float, task: str | None = None) -> Future[int]:
        """Finish an episode, effective at once. The future resolves when the outcome is durable."""
        ending = Ending(reward, task or name)
        outcome: dict[str, Any] = {"finish": name, **ending._asdict(), "ended": time.time()}
        payload = _with_arrays(outcome)
        with self._lock:
            self._unfinished[name].outcome = outcome
            self._finished[name] = ending
            return self._journal.append(payload, lambda done: self._on_durable(name, len(payload), done, finished=True))

    def compact(self) -> int:
        """Write the finished episodes to the store as one part, clean the journal, and return their number."""
        with self._compacting:
            if self.broken:  # a part that cannot be marked would be written again and again
                raise self.broken
            with self._lock:
                names = list(self._ready)
            if names:
                write_episodes(self.store, (episode_of(name, self._unfinished[name]) for name in names))
                self._mark_stored({name: self._finished[name] for name in names})
                with self._lock:
                    del self._ready[: len(names)]
                    for name in names:
                        self._needed.subtract(self._unfinished.pop(name).segments)
            self._clean()
            return len(names)

    def close(self) -> None:
        self._journal.close()

    def _on_durable(self, name: str, size: int, done: Future[int], finished: bool = False) -> None:
        """Runs before the segment is sealed, so that `_clean` knows which sealed segments are still needed."""
        if done.exception() is None:
            with self._lock:
                self._add_bytes(name, done.result(), size)
                if finished:
                    self._ready.append(name)

    def _add_bytes(self, name: str, segment: int, size: int) -> None:
        self._unfinished[name].segments[segment] += size
        self._needed[segment] += size

    def _mark_stored(self, endings: dict[str, Ending]) -> None:
        rewards, tasks = ({name: e[field] for name, e in endings.items()} for field in range(2))
        mark = _with_arrays({"stored": rewards, "tasks": tasks})
        self._marks[self._journal.append(mark).result()] += len(mark)

    def _clean(self) -> None:
        """Delete the oldest segments that no unfinished episode needs. Rewrite one if less than half of it is needed.

        A "stored" record stays until all segments before it are deleted, because they may contain calls of its
        episodes: without the record, an episode whose part you moved away would be written to the store again.
        """
        for segment in self._journal.sealed:
            if not self._needed[segment] and segment == self._journal.oldest:
                self._journal.drop(segment)
                continue
            size = self._journal.size(segment)
            if size > 2 * (self._needed[segment] + self._marks[segment]) + 4096:
                self._journal.rewrite(segment, self._is_needed)

    def _is_needed(self, payload: bytes) -> bool:
        head = _head(payload)
        return "stored" in head or (head.get("call") or head.get("finish")) in self._unfinished

    def _replay(self, segment: int, payload: bytes, unmarked: dict[str, Ending]) -> None:
        """Apply a record. `unmarked` collects episodes of the store that have no "stored" record, after a kill."""
        head = _head(payload)
        if "stored" in head:
            self._marks[segment] += len(payload)
            tasks = head.get("tasks", {})
            for name, reward in head["stored"].items():
                known = self._finished.get(name)
                self._finished[name] = Ending(reward, tasks.get(name, known and known.task))
                unmarked.pop(name, None)
                if unfinished := self._unfinished.pop(name, None):
                    self._needed.subtract(unfinished.segments)
                    if name in self._ready:  # cleaning may have removed its `finish` record and kept a call
                        self._ready.remove(name)
            return
        name = head.get("call") or head["finish"]
        if name in self._finished and name not in self._unfinished:
            unmarked[name] = self._finished[name]
            return
        unfinished = self._unfinished.setdefault(name, _Unfinished())
        if "call" in head:
            unfinished.calls.append(_recorded(head, payload))
            self._number = max(self._number, head["number"] + 1)
        else:
            unfinished.outcome = head
            self._finished[name] = Ending(head["reward"], head["task"])
            self._ready.append(name)
        self._add_bytes(name, segment, len(payload))


def episode_of(name: str, unfinished: _Unfinished) -> Episode:
    """The recorded calls in order of arrival, as one episode.

    An episode records one distribution for all its completions. If its calls were sampled from several, the most
    frequent one is recorded, and an unrestricted one takes precedence. The other calls stay in the episode as context:
    their log-probabilities belong to another distribution, so they are not trainable.
    """
    assert unfinished.outcome is not None
    recorded = sorted(unfinished.calls, key=lambda r: r.number)
    distribution = _main_distribution(recorded)
    differs = [r.call.trainable and _distribution(r.sampling) != distribution for r in recorded]
    calls = [replace(r.call, trainable=False) if d else r.call for r, d in zip(recorded, differs, strict=True)]
    if any(differs):
        first = differs.index(True)
        how = "temperature {}, top_p {}, top_k {}".format
        log.warning(
            "episode %s: %d of %d calls are context only: the episode was sampled with %s, but call %d with %s",
            name, sum(differs), len(calls), how(*distribution), first, how(*_distribution(recorded[first].sampling)),
        )  # fmt: skip
    limits = [r.sampling.max_tokens for r in recorded]
    limit = None if None in limits else max(n for n in limits if n is not None)
    seeds = {r.seed for r in recorded}
    return Episode(
        name,
        unfinished.outcome["task"],
        tuple(calls),
        unfinished.outcome["reward"],
        Sampling(*distribution, max_tokens=limit),
        seeds.pop() if len(seeds) == 1 else None,
        recorded[0].started,
        unfinished.outcome["ended"],
    )


def _main_distribution(recorded: list[Recorded]) -> tuple[float, float, int]:
    learnt = [r for r in recorded if r.call.trainable] or recorded
    counts = Counter(_distribution(r.sampling) for r in learnt)
    return max(counts, key=lambda d: (d[1:] == (1.0, 0), counts[d]))  # max takes the first among equals


def _distribution(sampling: Sampling) -> tuple[float, float, int]:
    return sampling.temperature, sampling.top_p, sampling.top_k


def _stored(store: Path) -> dict[str, Ending]:
    """The episodes in the store's parts. Without a column of tasks, each is a task of its own."""
    found: dict[str, Ending] = {}
    for part in sorted(store.glob("*.parquet")):
        try:
            with pq.ParquetFile(part, page_checksum_verification=True) as file:
                table = file.read(columns=["episode", "episode_reward", "task"])
            names, rewards = (table.column(name).to_pylist() for name in ("episode", "episode_reward"))
        except (pa.ArrowException, OSError, KeyError) as error:
            raise StoreError(f"{part}: cannot be read as a part of a store: {error}") from None
        tasks = table.column("task").to_pylist() if "task" in table.column_names else names
        found.update(zip(names, map(Ending, rewards, tasks), strict=True))
    return found


def _packed(recorded: Recorded) -> bytes:
    call, sampling, history = recorded.call, recorded.sampling, recorded.history
    logprobs = np.empty(0) if call.logprobs is None else call.logprobs
    head = {
        "call": recorded.episode,
        "number": recorded.number,
        "lengths": [len(logprobs), len(call.prompt), len(call.completion)],
        "stop": call.stop,
        "version": call.policy_version,
        "sampling": [sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens],
        "seed": recorded.seed,
        "started": recorded.started,
        "ended": recorded.ended,
        "shown": recorded.shown,
        "history": [history.replies, history.drifted, history.first],
        "purpose": call.purpose,
        "trainable": bool(call.trainable),
    }
    return _with_arrays(head, (logprobs, call.prompt, call.completion))


def _with_arrays(head: dict[str, Any], arrays: Iterable[Any] = ()) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)  # so that the arrays are aligned
    return b"".join([struct.pack("<I", len(text)), text, *(array.tobytes() for array in arrays)])


def _head(payload: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<I", payload)
    head: dict[str, Any] = json.loads(payload[4 : 4 + length])
    return head


def _recorded(head: dict[str, Any], payload: bytes) -> Recorded:
    at = 4 + struct.unpack_from("<I", payload)[0]
    arrays = []
    for dtype, length in zip((np.float64, np.int32, np.int32), head["lengths"], strict=True):
        arrays.append(np.frombuffer(payload, dtype, length, at))
        at += arrays[-1].nbytes
    logprobs, prompt, completion = arrays
    call = Call(
        prompt,
        completion,
        logprobs if len(logprobs) else None,
        head["stop"],
        trainable=head.get("trainable", True),  # older journals have neither
        purpose=head.get("purpose", ""),
        policy_version=head["version"],
        name=f"episode {head['call']!r}: call {head['number']}",
    )
    return Recorded(
        head["call"],
        head["number"],
        call,
        Sampling(*head["sampling"]),
        head["seed"],
        head["started"],
        head["ended"],
        head["shown"],
        History(*head["history"]),
    )
