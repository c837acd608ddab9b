"""Files that appear whole or not at all, and are on the disk when they must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from uuid import uuid4


@contextmanager
def whole(path: Path, durable: bool = False) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the real name when the block ends well.

    With `durable`, the file and its name are on the disk when this returns.
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
    """The same for a folder, which takes the place of an older one."""
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
    """Wait until a file's content, or the names in a folder, are on the disk: only then they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
