"""From journal to store: after a kill at any instant, each confirmed call and each finished episode is there once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memopd.gateway import episodes as gateway_episodes
from memopd.gateway.drift import History
from memopd.gateway.episodes import Ledger, Recorded
from memopd.record import StoreError, read_episodes
from memopd.record.journal import JournalError
from memopd.types import Call, Sampling, StopReason


def recorded(episode: str, number: int, length: int = 30, **changes: object) -> Recorded:
    rng = np.random.default_rng(number)
    call = Call(
        rng.integers(0, 150_000, length), rng.integers(0, 150_000, 5), -rng.random(5), StopReason.STOP, policy_version=4
    )
    values = {"call": call, "sampling": Sampling(0.7, max_tokens=9), "seed": 2, "started": 1.5, "ended": 2.25}
    return Recorded(episode, number, **values | changes)


def test_a_record_comes_back_as_it_was(tmp_path):
    ledger = Ledger(tmp_path)
    aborted = Call([1], [2, 3], None, StopReason.ABORTED)
    note = Call([1], [2, 3], [-1.0, -2.0], StopReason.STOP, trainable=False, purpose="note")
    given = [
        recorded("e", 0, shown=7, history=History(3, 1, 417)),
        recorded("e", 1, call=aborted, sampling=Sampling(top_p=0.5, top_k=3), seed=None),
        recorded("e", 2, call=note),
    ]
    for r in given:
        ledger.add(r).result(10)
    ledger.close()
    ledger = Ledger(tmp_path)
    for r, back in zip(given, ledger.calls("e"), strict=True):
        assert back.call == r.call
        for field in ("episode", "number", "sampling", "seed", "started", "ended", "shown", "history"):
            assert getattr(back, field) == getattr(r, field)
        assert back.call.prompt.flags.aligned
    assert ledger.next_number() == 3
    ledger.close()


def test_calls_are_in_the_order_of_arrival(tmp_path):
    ledger = Ledger(tmp_path)
    for number in (2, 0, 1):
        ledger.add(recorded("e", number))
    ledger.finish("e", 1.0).result(10)
    assert ledger.compact() == 1
    ledger.close()
    (episode,) = read_episodes(tmp_path)
    assert list(episode.calls) == [recorded("e", number).call for number in range(3)]
    assert (episode.task_id, episode.seed, episode.sampling.temperature) == ("e", 2, 0.7)


class Snapshots:
    """A copy of the directory around every call that makes something durable or visible: a kill at each instant."""

    def __init__(self, store: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.copies = store, copies
        self.confirmed: set[tuple[str, int]] = set()
        self.finished: set[str] = set()
        self.taken: list[tuple[Path, set[tuple[str, int]], set[str]]] = []
        for name in ("fsync", "fdatasync", "link", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._around(getattr(os, name)))

    def _around(self, call):
        def wrapped(*args, **kwargs):
            self.take()
            result = call(*args, **kwargs)
            self.take()
            return result

        return wrapped

    def take(self) -> None:
        copy = self.copies / f"{len(self.taken):04d}"
        confirmed, finished = set(self.confirmed), set(self.finished)
        shutil.copytree(self.store, copy)
        self.taken.append((copy, confirmed, finished))


def test_killed_at_any_instant(tmp_path, monkeypatch):
    store = tmp_path / "store"
    ledger = Ledger(store, segment_bytes=1500)
    with monkeypatch.context() as patched:
        snapshots = Snapshots(store, tmp_path / "copies", patched)
        number = 0
        for turn in range(4):
            for name in (f"a{turn}", f"b{turn}", "open"):
                for _ in range(2):
                    ledger.add(recorded(name, number)).result(10)
                    snapshots.confirmed.add((name, number))
                    number += 1
            for name in (f"a{turn}", f"b{turn}"):
                ledger.finish(name, 1.0).result(10)
                snapshots.finished.add(name)
            assert ledger.compact() == 2
        ledger.close()
    assert len(snapshots.taken) > 100
    assert (
        len({len(list(copy.glob("journal/*.journal"))) for copy, _, _ in snapshots.taken}) > 2
    )  # segments came and went
    number_of = {tuple(recorded("", n).call.prompt[:5]): n for n in range(number)}
    for copy, confirmed, finished in snapshots.taken:
        again = Ledger(copy)
        again.compact()
        calls = [("open", r.number) for r in again.calls("open")]
        for name in {name for name, _ in confirmed} - {"open"}:
            calls += [(name, r.number) for r in again.calls(name)]
        again.close()
        episodes = list(read_episodes(copy)) if list(copy.glob("*.parquet")) else []
        assert finished <= {episode.id for episode in episodes}
        calls += [(e.id, number_of[tuple(call.prompt[:5])]) for e in episodes for call in e.calls]
        assert len(set(calls)) == len(calls), copy
        assert confirmed <= set(calls), copy


def test_the_journal_shrinks_although_an_episode_stays_open(tmp_path):
    ledger = Ledger(tmp_path, segment_bytes=20_000)
    ledger.add(recorded("open", 0)).result(10)
    sizes = []
    for turn in range(40):
        for n in range(20):
            ledger.add(recorded(f"{turn}-{n}", 1 + 20 * turn + n))
            ledger.finish(f"{turn}-{n}", 0.0)
        ledger.add(recorded("open", 1000 + turn)).result(10)
        ledger.compact()
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob("journal/*")))
    assert sizes[-1] < 80_000  # of half a megabyte
    assert len(ledger.calls("open")) == 41
    ledger.close()
    ledger = Ledger(tmp_path)
    assert [r.number for r in ledger.calls("open")] == [0, *range(1000, 1040)]
    assert ledger.counts == (1, 800)
    assert ledger.waiting == 0
    ledger.finish("open", 1.0).result(10)
    assert ledger.compact() == 1
    ledger.close()
    assert len(list(read_episodes(tmp_path))) == 801


@pytest.mark.parametrize("marked", [True, False])
def test_a_part_that_was_taken_away_is_not_written_again(tmp_path, monkeypatch, marked):
    """Also when the process was killed between writing the part and marking it, and started again since."""
    ledger = Ledger(tmp_path)
    ledger.add(recorded("e", 0)).result(10)
    ledger.finish("e", 1.0).result(10)
    if marked:
        assert ledger.compact() == 1
    else:
        monkeypatch.setattr(Ledger, "_mark_stored", lambda self, rewards: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ledger.compact()
        monkeypatch.undo()
        ledger.close()
        ledger = Ledger(tmp_path)
    ledger.close()
    (part,) = tmp_path.glob("*.parquet")
    part.unlink()
    ledger = Ledger(tmp_path)
    assert ledger.reward("e") == 1.0
    assert ledger.compact() == 0
    ledger.close()
    assert not list(tmp_path.glob("*.parquet"))


def test_older_journals_and_parts_may_lack_tasks(tmp_path):
    """A part without the column belongs to the tasks that `read_episodes` gives it; of a mark alone none is known."""
    part = pa.table({"episode": ["a", "b"], "episode_reward": [1.0, 2.0]})
    pq.write_table(part, tmp_path / "part-00000.parquet")
    ledger = Ledger(tmp_path)
    ledger._journal.append(gateway_episodes._with_arrays({"stored": {"b": 2.0, "c": 3.0}})).result(10)
    ledger.close()
    ledger = Ledger(tmp_path)
    assert [ledger.ending(name) for name in "abcd"] == [(1.0, "a"), (2.0, "b"), (3.0, None), None]
    ledger.close()


def test_a_part_may_go_although_its_first_call_is_still_in_the_journal(tmp_path):
    """Cleaning rewrites the segment with its end, and keeps the one that its first call shares with others."""
    ledger = Ledger(tmp_path, segment_bytes=20_000)
    ledger.add(recorded("e", 0)).result(10)
    ledger.add(recorded("open", 1, 6000)).result(10)
    ledger.add(recorded("e", 2, 4000)).result(10)
    ledger.finish("e", 1.0).result(10)
    ledger.add(recorded("open", 3, 1000)).result(10)
    ledger.compact()
    ledger.add(recorded("open", 4, 6000)).result(10)
    ledger.compact()
    ledger.close()
    (part,) = tmp_path.glob("*.parquet")
    part.unlink()
    ledger = Ledger(tmp_path, segment_bytes=20_000)
    assert ledger.reward("e") == 1.0
    assert ledger.compact() == 0
    assert [r.number for r in ledger.calls("open")] == [1, 3, 4]
    ledger.close()


def test_a_store_that_cannot_be_written_keeps_the_episodes(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path)
    ledger.add(recorded("e", 0)).result(10)
    ledger.finish("e", 1.0).result(10)

    def full(path, episodes):
        list(episodes)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gateway_episodes, "write_episodes", full)
    with pytest.raises(OSError, match="No space"):
        ledger.compact()
    monkeypatch.undo()
    assert ledger.waiting == 1
    assert ledger.compact() == 1
    ledger.close()


@pytest.mark.parametrize("failing", ["a call", "the mark of the part"])
def test_after_a_failed_write_of_the_journal_no_episode_is_written_twice(tmp_path, monkeypatch, failing):
    """The journal is then broken until a restart, although the disk has space again."""
    ledger = Ledger(tmp_path)
    ledger.add(recorded("e", 0)).result(10)
    ledger.finish("e", 1.0).result(10)

    def full(handle, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)  # so that nothing of the record is in the journal
        with pytest.raises(JournalError, match="until a restart"):
            ledger.add(recorded("open", 1)).result(10) if failing == "a call" else ledger.compact()
    written = [] if failing == "a call" else [tmp_path / "part-00000.parquet"]
    for _ in range(2):
        with pytest.raises(JournalError, match="until a restart"):
            ledger.compact()
        assert list(tmp_path.glob("*.parquet")) == written
    ledger.close()
    ledger = Ledger(tmp_path)
    assert ledger.compact() == (failing == "a call")
    ledger.close()
    assert [episode.id for episode in read_episodes(tmp_path)] == ["e"]
    (part,) = tmp_path.glob("*.parquet")
    part.unlink()
    ledger = Ledger(tmp_path)
    assert ledger.reward("e") == 1.0  # because it is marked
    assert ledger.compact() == 0
    ledger.close()


def test_stores_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="must be a directory"):
        Ledger(tmp_path / "e.parquet")
    (tmp_path / "part-00000.parquet").write_bytes(b"not parquet")
    with pytest.raises(StoreError, match=r"part-00000\.parquet: cannot be read"):
        Ledger(tmp_path)
    (tmp_path / "part-00000.parquet").unlink()
    ledger = Ledger(tmp_path)
    with pytest.raises(ValueError, match="another process records here"):
        Ledger(tmp_path)
    ledger._journal.append(gateway_episodes._with_arrays({"novelty": 1})).result(10)
    ledger.close()
    with pytest.raises(JournalError, match="segment 0: a record of another version"):
        Ledger(tmp_path)
