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


def check_model_folder(path: str) -> None:
    """Refuses a folder without a model; leaves to the hub what can be a name there: one slash, no leading dot."""
    first, *rest = path.split("/")
    local = Path(path).exists() or path.startswith((".", "/")) or len(rest) > 1 or bool(rest and Path(first).is_dir())
    if local and not Path(path, "config.json").is_file():
        raise ValueError(f"{path}: there is no model here (no config.json)")
