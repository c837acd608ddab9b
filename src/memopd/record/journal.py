"""An append-only journal: what must be on disk before an answer leaves.

    segment   "MEMOPDJ1", then records
    record    length of the payload u32 | CRC-32 of the payload u32 | CRC-32 of these eight bytes u32 | payload

A process that is killed leaves a prefix of what it wrote. So a last record that the end of the file cuts short was
being written, nobody has been answered for it, and it is cut off. The header has a checksum of its own because a
flipped bit in a length would otherwise look like that, and take every later record along. All else that does not
check out is damage and an error.
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

from memopd.files import sync, whole

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
_GROUP_BYTES = 16 << 20  # one write and one fsync take no more than this, and what came with it
_MAGIC = b"MEMOPDJ1"
_HEADER = struct.Struct("<III")

_Entry: TypeAlias = tuple[bytes, "Future[int]"]


class JournalError(ValueError):
    """A journal that cannot be read, or no longer written: one line that names the file and the place."""


class Journal:
    """Numbered segment files in a directory of their own. `append` may be called from any thread.

    Writers that wait at the same time share one fsync: a thread takes all that has come, writes it, makes it
    durable, and only then resolves the futures.
    """

    def __init__(self, directory: str | Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.directory)  # one process writes; the lock dies with it
        self._segment_bytes = segment_bytes
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._broken: JournalError | None = None
        self._closed = False
        self._handle = -1
        try:
            self._numbers = self._found()
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
        """Why nothing more can be written."""
        return self._broken

    @property
    def sealed(self) -> list[int]:
        """The segments that are no longer written to, oldest first."""
        return self._numbers[:-1]

    @property
    def oldest(self) -> int:
        return self._numbers[0]

    def size(self, segment: int) -> int:
        return self._path(segment).stat().st_size

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Every record, oldest first, with its segment. To be read before the first `append`."""
        for number in list(self._numbers):
            path = self._path(number)
            data = path.read_bytes()
            for start, stop in _payloads(path, data, last=False):  # a torn tail is gone by now
                yield number, data[start:stop]

    def append(self, payload: bytes, landed: Callable[[Future[int]], None] | None = None) -> Future[int]:
        """Resolves when the record is durable, with the number of its segment.

        `landed` is called with the future before that segment can be sealed.
        """
        if not payload or self._closed:
            raise ValueError("the journal is closed" if self._closed else "a record must not be empty")
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # whoever waits may go away; the record stays
        if landed:
            future.add_done_callback(landed)  # now: later it could run at once, in the caller's thread
        self._queue.put((payload, future))
        return future

    def drop(self, segment: int) -> None:
        """Delete the oldest segment: gaps would look like a lost file."""
        if segment != self._numbers[0] or len(self._numbers) == 1:
            raise ValueError(f"segment {segment} is not the oldest of those no longer written to")
        self._path(segment).unlink()
        sync(self.directory)
        self._numbers.pop(0)

    def rewrite(self, segment: int, keep: Callable[[bytes], bool]) -> None:
        """Replace a sealed segment by one with the records worth keeping, in one step."""
        if segment not in self.sealed:
            raise ValueError(f"segment {segment} is still written to")
        path = self._path(segment)
        data = path.read_bytes()
        payloads = (data[start:stop] for start, stop in _payloads(path, data, last=False))
        with whole(path, durable=True) as partial, partial.open("xb") as file:
            file.write(_MAGIC)
            file.writelines(_framed(payload) for payload in payloads if keep(payload))

    def close(self) -> None:
        """Writes what waits, then lets another process in."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            os.close(self._handle)
            os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.journal"

    def _found(self) -> list[int]:
        for leftover in self.directory.glob(".*.journal"):  # of a rewrite that was killed
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
        if len(data) < len(_MAGIC) and _MAGIC.startswith(data):  # killed while it was being started
            path.write_bytes(_MAGIC)
            end = len(_MAGIC)
        else:
            end = max((stop for _, stop in _payloads(path, data, last=True)), default=len(_MAGIC))
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        if end < len(data):
            log.warning("%s: cut %d bytes off at %d: a record that was being written", path, len(data) - end, end)
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
                future.set_result(number)
            if self._size >= self._segment_bytes:
                try:
                    self._start(number + 1)
                except OSError as failed:
                    self._broken = self._failed(failed)

    def _group(self) -> list[_Entry]:
        """Waits for one record and takes all that came with it; empty at the end."""
        batch: list[_Entry] = []
        size = 0
        with suppress(Empty):  # no more have come yet
            while size < _GROUP_BYTES:
                entry = self._queue.get(block=not batch)
                if entry is None:
                    if batch:
                        self._queue.put(None)  # for the next round
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
            # Half a record may stand in the file, and a failed fsync is not to be asked again: pages that it could
            # not write count as clean afterwards. A restart reads the file and cuts it where it must.
            return self._failed(error)
        self._size += len(data)
        return None

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(f"{self.directory}: {error.strerror or error}: nothing more is recorded until a restart")


def _framed(payload: bytes) -> bytes:
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _payloads(path: Path, data: bytes, last: bool) -> Iterator[tuple[int, int]]:
    """Where the payloads begin and end. Stops at a torn tail if this is the `last` segment; damage raises."""
    if not data.startswith(_MAGIC):
        raise JournalError(f"{path}: damaged at offset 0: it does not begin with {_MAGIC.decode()}")
    at = len(_MAGIC)
    while at < len(data):
        start = at + _HEADER.size
        if start > len(data):
            torn, intact, stop = True, False, start
        else:
            length, checksum, of_header = _HEADER.unpack_from(data, at)
            stop = start + length
            whole_header = zlib.crc32(data[at : start - 4]) == of_header
            # Zeros to the end: the file had grown when the machine went down, its last pages had not come.
            torn = stop > len(data) if whole_header else data.count(0, at) == len(data) - at
            intact = whole_header and not torn and zlib.crc32(memoryview(data)[start:stop]) == checksum
        if torn and last:
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
