"""Atomic and durable writes of files and folders, digests of their content, and a reader of JSON lines."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

DIGESTS = "digests.json"  # in a folder that we wrote: the SHA-256 of each of its files

_TEMPORARY = re.compile(r"\.memopd-[0-9a-f]{32}")


@contextmanager
def whole(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path on the same disk to write to, and rename it to `path` if the block succeeds.

    With `durable`, the file and its name are on the disk when the block has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        _readable(folder, [temporary])
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)


@contextmanager
def whole_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Do the same for a folder. An existing one is replaced, or refused before the block."""
    if path.exists() and not replace:
        raise ValueError(f"{path}: already exists; remove it first or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path.parent) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        yield temporary
        _readable(folder, temporary.rglob("*"))
        if replace and path.exists():
            path.rename(folder / f"{path.name}.old")  # not removed in place: a kill would leave half of it
        temporary.rename(path)


def _readable(made: Path, files: Iterable[Path]) -> None:
    """Give files the permissions that new ones have here, as the folder `made` got them: safetensors lets their owner
    alone read its files, and a policy server may be another user."""
    mode = made.stat().st_mode & 0o666
    for file in files:
        with suppress(OSError):  # a file system without permissions
            if file.is_file() and not file.is_symlink():
                file.chmod(mode)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed after the block. System errors name the path without it.

    If the process is killed, the next call for the same parent removes the folder. A lock tells it that the process has
    ended: the kernel holds the lock as long as the process has the folder open.
    """
    remove_leftovers(parent)
    try:
        folder, lock = _locked_folder(parent)
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        if isinstance(error.filename, str | Path):
            error.filename = str(lasting(Path(error.filename)))
        raise


def lasting(path: Path) -> Path:
    """The place that a path in a temporary folder will have: the one that a user knows."""
    return Path(*(part for part in path.parts if not _TEMPORARY.fullmatch(part)))


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders of processes that were killed, and none that is in use."""
    for folder in [parent / name for name in os.listdir(parent) if _TEMPORARY.fullmatch(name)]:
        with suppress(OSError):  # in use, removed by another process meanwhile, or on a file system without such locks
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / f".memopd-{uuid4().hex}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process removed it as a leftover before it was locked
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # another process is removing it
        except OSError:  # a file system without such locks, where nobody removes leftovers
            return folder, lock
        else:
            if folder.exists():
                return folder, lock
        os.close(lock)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk, where they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder, by its path in the folder, without the file that holds the digests."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {name: digest(f) for f in files if (name := f.relative_to(folder).as_posix()) != DIGESTS}


def write_digests(folder: Path) -> None:
    """Write the digests of a folder into it, after all its other files, for `check_digests`."""
    (folder / DIGESTS).write_text(json.dumps(digests(folder), indent=2) + "\n")


def check_digests(folder: Path, skip: str = "") -> None:
    """Raise an error if a file of the folder is damaged or missing. A folder without digests, and files that were
    added later, pass. `skip` is a pattern of names that you do not read, such as *.safetensors."""
    path = folder / DIGESTS
    if not path.is_file():
        return
    otherwise = f"copy the folder again, or delete {path} if you changed it on purpose"
    try:
        expected = json_object(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}): {otherwise}") from None
    for name, value in expected.items():
        file = folder / name
        if fnmatch(name, skip):
            continue
        if not file.is_file():
            raise ValueError(f"{file}: missing: {otherwise}")
        if digest(file) != value:
            raise ValueError(f"{file}: damaged, its content does not match its digest: {otherwise}")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object that is the content of a file."""
    try:
        value = json.loads(file.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a JSON object, is a {type(value).__name__}")
    return value


def json_lines(path: Path, *, finished: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a .jsonl or .jsonl.gz file, each with the number of its line; errors name file and line.

    With `finished`, a last line without a newline is skipped, because its writer was killed.
    """
    for number, line in lines(path):
        if finished and not line.endswith(b"\n"):
            return
        try:
            value = json_object(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        yield number, value


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number (from 1). Files named *.gz are decompressed."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: line {number + 1}: cannot be read: {error}; is the file cut off or damaged?"
        ) from None


def json_object(line: bytes) -> dict[str, Any]:
    """Parse the object on one line, for readers that may skip a bad line. A field must not be given twice."""
    try:
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"not a line of JSON: not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def json_value(path: Path) -> Any:
    """The value of a .json or .json.gz file, which is read whole."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        lines = isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        why = "a file of lines must end in .jsonl or .jsonl.gz" if lines else "is the file cut off or damaged?"
        raise ValueError(f"{path}: cannot be read as JSON: {error}; {why}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return value
