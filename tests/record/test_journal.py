"""The journal returns exactly the confirmed records, in order, after killed writers, flipped bits and failing disks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memopd.record import journal as module
from memopd.record.journal import Journal, JournalError

PAYLOADS = [bytes([i]) * (5 + 7 * i) for i in range(1, 20)]


def filled(directory: Path, payloads: list[bytes] = PAYLOADS, segment_bytes: int = module.SEGMENT_BYTES) -> list[Path]:
    journal = Journal(directory, segment_bytes)
    for payload in payloads:
        journal.append(payload).result(10)
    journal.close()
    return sorted(directory.glob("*.journal"))


def contents(directory: Path) -> list[bytes]:
    journal = Journal(directory)
    try:
        return [payload for _, payload in journal.records()]
    finally:
        journal.close()


def test_what_was_appended_is_read_back_in_order_across_segments(tmp_path):
    files = filled(tmp_path, segment_bytes=300)
    assert len(files) > 3
    assert contents(tmp_path) == PAYLOADS
    filled(tmp_path, [b"later"])
    assert contents(tmp_path) == [*PAYLOADS, b"later"]


def test_many_writers_share_one_fsync(tmp_path, monkeypatch):
    hold, begun, syncs = threading.Event(), threading.Event(), []
    sync = os.fdatasync

    def slow(handle):
        begun.set()
        assert hold.wait(10)
        syncs.append(handle)
        sync(handle)

    monkeypatch.setattr(module.os, "fdatasync", slow)
    journal = Journal(tmp_path)
    first = journal.append(b"first")
    assert begun.wait(10)
    rest = [journal.append(payload) for payload in PAYLOADS]
    hold.set()
    assert {future.result(10) for future in (first, *rest)} == {0}
    assert len(syncs) == 2
    journal.close()


def test_nothing_is_confirmed_before_it_is_durable(tmp_path, monkeypatch):
    hold, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(module.os, "fdatasync", lambda handle: (begun.set(), hold.wait(10)))
    journal = Journal(tmp_path)
    future = journal.append(b"record")
    assert begun.wait(10)
    assert not future.done()
    hold.set()
    assert future.result(10) == 0
    journal.close()


@pytest.mark.parametrize("left", [0, 1, 7, 11, 12, 13, -1])
def test_an_incomplete_last_record_is_removed_with_one_line(tmp_path, caplog, left):
    """`left` bytes of the last record are in the file; -1: all but one."""
    (file,) = filled(tmp_path)
    data = file.read_bytes()
    begin = len(data) - 12 - len(PAYLOADS[-1])
    file.write_bytes(data[: begin + left] if left >= 0 else data[:-1])
    with caplog.at_level(logging.WARNING):
        assert contents(tmp_path) == PAYLOADS[:-1]
    assert len(caplog.records) == (left != 0)
    removed = f"at offset {begin}: the process was killed while it wrote this record"
    assert all(f"{file}: removed" in r.getMessage() and removed in r.getMessage() for r in caplog.records)
    assert file.read_bytes() == data[:begin]
    filled(tmp_path, [b"later"])
    assert contents(tmp_path) == [*PAYLOADS[:-1], b"later"]


def test_zeros_at_the_end_are_an_incomplete_record(tmp_path):
    (file,) = filled(tmp_path)
    with file.open("ab") as tail:
        tail.write(bytes(5000))
    assert contents(tmp_path) == PAYLOADS


@pytest.mark.parametrize("begun", [b"", b"MEMO"])
def test_a_segment_that_was_only_begun(tmp_path, begun):
    filled(tmp_path)
    (tmp_path / "00000001.journal").write_bytes(begun)
    assert contents(tmp_path) == PAYLOADS
    filled(tmp_path, [b"later"])
    assert contents(tmp_path) == [*PAYLOADS, b"later"]


def test_every_flipped_bit_is_an_error_that_names_file_and_offset(tmp_path):
    (file,) = filled(tmp_path, PAYLOADS[:3])
    data = file.read_bytes()
    starts = [8]
    for payload in PAYLOADS[:2]:
        starts.append(starts[-1] + 12 + len(payload))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        at = max((start for start in starts if start <= bit // 8), default=0)
        with pytest.raises(JournalError, match=rf"{file}: damaged at offset {at}:"):
            contents(tmp_path)
    assert file.read_bytes() == flipped  # never "repaired"


def test_a_short_segment_that_is_not_the_last_is_damage(tmp_path):
    files = filled(tmp_path, segment_bytes=300)
    files[1].write_bytes(files[1].read_bytes()[:-3])
    with pytest.raises(JournalError, match=rf"{files[1]}: damaged at offset \d+:"):
        contents(tmp_path)


def test_a_missing_segment_is_an_error(tmp_path):
    files = filled(tmp_path, segment_bytes=300)
    files[1].unlink()
    with pytest.raises(JournalError, match=rf"{files[1]}: this segment is missing"):
        contents(tmp_path)


def test_one_process_at_a_time(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="another process records here"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_failed_write_is_the_last(tmp_path, monkeypatch):
    """After half a record the journal must confirm nothing more; a restart removes the half."""
    journal = Journal(tmp_path)
    journal.append(b"before").result(10)
    write, room = os.write, [15]

    def nearly_full(handle, data):
        if not room:
            raise OSError(28, "No space left on device")
        return write(handle, data[: room.pop()])

    monkeypatch.setattr(module.os, "write", nearly_full)
    with pytest.raises(JournalError, match="No space left on device: nothing more is recorded until a restart"):
        journal.append(b"lost" * 10).result(10)
    monkeypatch.undo()
    with pytest.raises(JournalError, match="nothing more is recorded"):
        journal.append(b"after").result(10)
    assert isinstance(journal.broken, JournalError)
    journal.close()
    assert contents(tmp_path) == [b"before"]
    filled(tmp_path, [b"later"])
    assert contents(tmp_path) == [b"before", b"later"]


def test_a_failed_fsync_is_not_repeated(tmp_path, monkeypatch):
    journal = Journal(tmp_path)

    def failing(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "fdatasync", failing)
    with pytest.raises(JournalError, match="Input/output error"):
        journal.append(b"unsure").result(10)
    monkeypatch.undo()
    with pytest.raises(JournalError, match="Input/output error"):
        journal.append(b"after").result(10)
    journal.close()
    assert b"after" not in contents(tmp_path)


def test_segments_are_rewritten_and_dropped(tmp_path):
    filled(tmp_path, segment_bytes=300)
    journal = Journal(tmp_path)
    where: dict[int, list[bytes]] = {}
    for segment, payload in journal.records():
        where.setdefault(segment, []).append(payload)
    first, second, *_ = journal.sealed
    active = journal.sealed[-1] + 1
    with pytest.raises(ValueError, match="not the oldest"):
        journal.drop(second)
    with pytest.raises(ValueError, match="still written to"):
        journal.rewrite(active, lambda payload: True)
    before = journal.size(second)
    journal.rewrite(second, lambda payload: payload != where[second][0])
    assert journal.size(second) < before
    journal.drop(first)
    journal.append(b"later").result(10)
    journal.close()
    kept = [payload for segment, group in where.items() for payload in group if segment != first]
    kept.remove(where[second][0])
    assert contents(tmp_path) == [*kept, b"later"]


def test_on_durable_runs_before_its_segment_is_sealed(tmp_path):
    journal = Journal(tmp_path, segment_bytes=100)
    late = []
    for payload in PAYLOADS * 5:
        future = journal.append(payload, lambda done: late.append(done.result() in journal.sealed))
        future.result(10)
    journal.close()
    assert len(late) == 5 * len(PAYLOADS)
    assert not any(late)


def test_a_rewrite_that_was_killed_changes_nothing(tmp_path):
    filled(tmp_path, segment_bytes=300)
    (tmp_path / ".00000001.0123456789abcdef.journal").write_bytes(b"MEMOPDJ1 half")
    assert contents(tmp_path) == PAYLOADS
    assert not list(tmp_path.glob(".*"))


WRITER = """
import sys
from memopd.record.journal import Journal
journal = Journal(sys.argv[1], 1 << 16)
for i in range(10**9):
    futures = [journal.append(b"%d-%d " % (i, j) * (50 + j)) for j in range(8)]
    for j, future in enumerate(futures):
        future.result()
        sys.stdout.write(f"{i}-{j}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("lines", [40, 333, 1500])
def test_kill_9_loses_nothing_that_was_confirmed(tmp_path, lines):
    with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
        confirmed = [writer.stdout.readline().strip() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        confirmed += writer.stdout.read().splitlines()[:-1]  # the last line may be half a line
    recorded = [payload.split()[0].decode() for payload in contents(tmp_path)]
    assert recorded[: len(confirmed)] == confirmed
    assert len(set(recorded)) == len(recorded)


def test_closing_writes_the_queued_records(tmp_path):
    journal = Journal(tmp_path)
    futures = [journal.append(payload) for payload in PAYLOADS]
    journal.close()
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="closed"):
        journal.append(b"late")
    assert contents(tmp_path) == PAYLOADS
