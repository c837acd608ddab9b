"""Import calls that other programs recorded, in their formats or in one of your own.

    calls        JSON lines, one call each (calls.py)
    verifiers    traces.jsonl: a graph of messages (verifiers.py)
    verl         rows with a response_mask (verl.py)
    skyrl        pickled batches, read without executing them (skyrl.py)
    auto         whichever of them the file is, where that is unmistakable; otherwise calls

Each is a function from a file's path to episodes. To read a format of your own, write such a function and name it:
`memopd import FILE --format my_module:read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from memopd.files import json_object, lines
from memopd.names import resolve
from memopd.record.importers.calls import import_calls
from memopd.record.importers.pickles import first_name
from memopd.record.importers.skyrl import import_skyrl, is_batch
from memopd.record.importers.text import refuse_text
from memopd.record.importers.verifiers import import_verifiers, is_trace
from memopd.record.importers.verl import import_verl
from memopd.record.store import StoreError
from memopd.types import Episode

__all__ = ["IMPORTERS", "Importer", "detect", "import_calls", "import_episodes"]

Importer: TypeAlias = Callable[[Path], Iterable[Episode]]


def import_any(path: Path) -> Iterable[Episode]:
    """The episodes of a file in whichever of the formats it is."""
    return IMPORTERS[detect(path)](path)


IMPORTERS: dict[str, Importer] = {
    "auto": import_any,
    "calls": import_calls,
    "verifiers": import_verifiers,
    "verl": import_verl,
    "skyrl": import_skyrl,
}


def import_episodes(path: str | Path, format: str = "auto") -> Iterator[Episode]:
    """Yield the episodes of a file. `format` is one of IMPORTERS, or `module:name` for a function of your own."""
    read: Importer = resolve("--format", format, IMPORTERS)
    return _checked(read, Path(path), format)


def _checked(read: Importer, path: Path, format: str) -> Iterator[Episode]:
    """Yield the episodes that an importer returns, after a type check. The ValueErrors of a user's name the file."""
    try:
        if format in IMPORTERS and not path.is_file():
            raise StoreError(f"{path}: no such file")
        episodes = read(path)
        if not isinstance(episodes, Iterable):
            raise ValueError(f"must return episodes, got {type(episodes).__name__}")
        for number, episode in enumerate(episodes):
            if not isinstance(episode, Episode):
                raise ValueError(f"result {number} must be an Episode, got {type(episode).__name__}")
            yield episode
    except StoreError:
        raise  # it names the file already
    except ValueError as error:
        raise ValueError(f"{path}: --format: {format!r}: {error}") from error


def detect(path: Path) -> str:
    """The format of a file, from its first bytes, its first line, or the first name in a pickle."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head.startswith(b"PK\x03\x04"):
        return "verl"
    if head.startswith(b"\x80"):
        return "skyrl" if is_batch(first_name(head)) else "verl"
    if head.startswith(b"PAR1"):
        return _detect_parquet(path)
    _, line = next(lines(path), (0, b"{}"))
    try:
        first = json_object(line)
    except ValueError:
        return "calls"  # which says what is wrong with the line
    if is_trace(first):
        return "verifiers"
    return "verl" if "response_mask" in first else "calls"


def _detect_parquet(path: Path) -> str:
    import pyarrow.parquet as pq

    refuse_text(path, next(iter(pq.ParquetFile(path).iter_batches(1))).to_pylist()[0])
    raise StoreError(f"{path}: Parquet is no format for import; write its rows as JSON lines, one call each")
