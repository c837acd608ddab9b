"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from uuid import uuid4


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the real name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{uuid4().hex}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
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
