"""Atomic and durable writes of files and folders, and a reader of JSON lines."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4


@contextmanager
def whole(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to, and rename it to `path` if the block succeeds.

    With `durable`, the file and its name are on the disk when the block has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{uuid4().hex}{path.suffix}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Do the same for a folder, which replaces an existing one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            rmtree(path)
        temporary.rename(path)
    finally:
        rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk, where they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        raise ValueError(f"{path}: cannot be read as JSON: {error}; is the file cut off or damaged?") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return value
