"""An append-only journal for records that must be on disk before a client gets an answer.

    segment   "MEMOPDJ1", then records
    record    length of the payload u32 | CRC-32 of the payload u32 | CRC-32 of these eight bytes u32 | payload

A killed process leaves a prefix of the bytes that it wrote. If the file ends in the middle of its last record, the
process was still writing that record and had confirmed it to no client, so the journal removes it. The header has its
own checksum: without it, a flipped bit in a length would look like an incomplete record, and all records after it would
be lost. Any other mismatch means that the file is damaged, and raises an error.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeAlias

from memopd.files import remove_leftovers, sync, whole

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
_GROUP_BYTES = 16 << 20  # a group of records gets one write and one fsync; it is closed when it reaches this size
_MAGIC = b"MEMOPDJ1"
_HEADER = struct.Struct("<III")

_Entry: TypeAlias = tuple[bytes, "Future[int]"]


class JournalError(ValueError):
    """The journal cannot be read, or can no longer be written. The message is one line that names the file."""


class Journal:
    """Numbered segment files in a directory of their own. A full one is sealed. `append` is thread-safe.

    Callers that wait at the same time share one fsync: a thread takes all queued records, writes them, makes them
    durable, and only then resolves their futures.
    """

    def __init__(self, directory: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.directory)  # only one process may write; its lock ends with the process
        self._segment_bytes = segment_bytes
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._broken: JournalError | None = None
        self._closed = False
        self._handle = -1
        try:
            self._numbers = self._segments_on_disk()
            self._open_last()
        except BaseException:
            if self._handle >= 0:
                os.close(self._handle)
            os.close(self._lock)
            raise
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> JournalError | None:
        """The error that ended writing, if there was one."""
        return self._broken

    @property
    def sealed(self) -> list[int]:
        """The numbers of the segments that are full, oldest first."""
        return self._numbers[:-1]

    @property
    def oldest(self) -> int:
        return self._numbers[0]

    def size(self, segment: int) -> int:
        return self._path(segment).stat().st_size

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield every record, oldest first, with the number of its segment. Call it before the first `append`."""
        for number in list(self._numbers):
            path = self._path(number)
            data = path.read_bytes()
            for start, stop in _payloads(path, data, last=False):  # _open_last has removed an incomplete record
                yield number, data[start:stop]

    def append(self, payload: bytes, on_durable: Callable[[Future[int]], None] | None = None) -> Future[int]:
        """Write a record. The future resolves to the number of its segment as soon as the record is durable.

        The journal calls `on_durable` with the future, also if writing failed, before it seals that segment.
        """
        if not payload or self._closed:
            raise ValueError("the journal is closed" if self._closed else "a record must not be empty")
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # the caller can no longer cancel it: the record will be written
        if on_durable:
            # Added before the record is queued: the callback of a finished future would run in the caller's thread.
            future.add_done_callback(on_durable)
        self._queue.put((payload, future))
        return future

    def drop(self, segment: int) -> None:
        """Delete the oldest segment. Only the oldest: a gap in the numbers would look like a lost file."""
        if segment != self._numbers[0] or len(self._numbers) == 1:
            raise ValueError(f"segment {segment} is not the oldest of the full segments")
        self._path(segment).unlink()
        sync(self.directory)
        self._numbers.pop(0)

    def rewrite(self, segment: int, keep: Callable[[bytes], bool]) -> None:
        """Replace a full segment atomically by one that has only the records for which `keep` is true."""
        if segment not in self.sealed:
            raise ValueError(f"segment {segment} is still written to")
        path = self._path(segment)
        data = path.read_bytes()
        payloads = (data[start:stop] for start, stop in _payloads(path, data, last=False))
        with whole(path, durable=True) as partial, partial.open("xb") as file:
            file.write(_MAGIC)
            file.writelines(_framed(payload) for payload in payloads if keep(payload))

    def close(self) -> None:
        """Write all queued records, then release the lock for other processes."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            os.close(self._handle)
            os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.journal"

    def _segments_on_disk(self) -> list[int]:
        remove_leftovers(self.directory)
        for leftover in self.directory.glob(".*.journal"):  # an older version that was killed during a rewrite
            leftover.unlink()
        files = sorted(self.directory.glob("*.journal"))
        for path in files:
            if not path.stem.isdecimal():
                raise JournalError(f"{path}: not a segment of this journal; move it elsewhere")
        numbers = [int(path.stem) for path in files]
        for before, number in pairwise(numbers):
            if number != before + 1:
                raise JournalError(f"{self._path(before + 1)}: this segment is missing; restore it from a copy")
        return numbers

    def _open_last(self) -> None:
        if not self._numbers:
            self._start(0)
            return
        path = self._path(self._numbers[-1])
        data = path.read_bytes()
        if len(data) < len(_MAGIC) and _MAGIC.startswith(data):  # the process was killed while it created the segment
            path.write_bytes(_MAGIC)
            end = len(_MAGIC)
        else:
            end = max((stop for _, stop in _payloads(path, data, last=True)), default=len(_MAGIC))
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        if end < len(data):
            log.warning(
                "%s: removed %d bytes at offset %d: the process was killed while it wrote this record",
                path,
                len(data) - end,
                end,
            )
            os.ftruncate(self._handle, end)
        os.fsync(self._handle)
        self._size = end

    def _start(self, number: int) -> None:
        handle = os.open(self._path(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(handle, _MAGIC)
        os.fsync(handle)
        sync(self.directory)
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._size = handle, len(_MAGIC)
        self._numbers.append(number)

    def _run(self) -> None:
        while batch := self._group():
            error = self._broken or self._write(b"".join(_framed(payload) for payload, _ in batch))
            if error:
                self._broken = error
                for _, future in batch:
                    future.set_exception(error)
                continue
            number = self._numbers[-1]
            for _, future in batch:
                future.set_result(number)  # runs the `on_durable` callbacks, before the next segment starts
            if self._size >= self._segment_bytes:
                try:
                    self._start(number + 1)
                except OSError as failure:
                    self._broken = self._failed(failure)

    def _group(self) -> list[_Entry]:
        """Wait for a record and return it with all others in the queue. Empty when the journal is closed."""
        batch: list[_Entry] = []
        size = 0
        with suppress(Empty):  # the queue has no more records
            while size < _GROUP_BYTES:
                entry = self._queue.get(block=not batch)
                if entry is None:
                    if batch:
                        self._queue.put(None)  # so that the next call returns an empty batch
                    break
                batch.append(entry)
                size += len(entry[0])
        return batch

    def _write(self, data: bytes) -> JournalError | None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._handle, view) :]
            os.fdatasync(self._handle)
        except OSError as error:
            # The file may end with half a record, and another fsync could report success although data is lost: the
            # kernel marks pages as clean even if it failed to write them. A restart reads and repairs the file.
            return self._failed(error)
        self._size += len(data)
        return None

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(f"{self.directory}: {error.strerror or error}: nothing more is recorded until a restart")


def _framed(payload: bytes) -> bytes:
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _payloads(path: Path, data: bytes, last: bool) -> Iterator[tuple[int, int]]:
    """Yield where each payload begins and ends. Stop at an incomplete record of the `last` segment."""
    if not data.startswith(_MAGIC):
        raise JournalError(f"{path}: damaged at offset 0: it does not begin with {_MAGIC.decode()}")
    at = len(_MAGIC)
    while at < len(data):
        start = at + _HEADER.size
        if start > len(data):
            incomplete, intact, stop = True, False, start
        else:
            length, checksum, header_checksum = _HEADER.unpack_from(data, at)
            stop = start + length
            header_intact = zlib.crc32(data[at : start - 4]) == header_checksum
            # Zeros up to the end: after a power cut the file may have its new length but not its last pages.
            incomplete = stop > len(data) if header_intact else data.count(0, at) == len(data) - at
            intact = header_intact and not incomplete and zlib.crc32(memoryview(data)[start:stop]) == checksum
        if incomplete and last:
            return
        if not intact:
            raise _damaged(path, at)
        yield start, stop
        at = stop


def _damaged(path: Path, at: int) -> JournalError:
    return JournalError(
        f"{path}: damaged at offset {at}: a checksum does not match; restore the file from a copy, or give up this "
        f"record and all after it with: truncate --size {at} {path}"
    )


def _locked(directory: Path) -> int:
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{directory}: another process records here; stop it or choose another store") from None
    return handle
