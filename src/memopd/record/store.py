"""The episode store: Parquet with one row per call, which pandas, polars and `datasets` can open.

    A: "PAR1", row groups   |   sha256 of A and F, 32 bytes   |   F: footer, its length, "PAR1"

A Parquet reader finds the footer from the end of the file and everything else by absolute offsets, so other readers
skip the digest. Parquet's own checksums cover only the pages; the digest covers every bit of the file.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from io import BufferedRandom
from itertools import count, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memopd.files import sync, temporary_folder
from memopd.types import Call, Episode, Sampling, Segment

Row: TypeAlias = dict[str, Any]  # column to value


class Column(NamedTuple):
    name: str
    type: Any
    source: str  # the attribute of a call, of its episode or of the episode's sampling
    nullable: bool = False


_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
_IDS, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float64())
_SEGMENTS = pa.list_(pa.struct({"kind": _TEXT, "start": pa.int32(), "stop": pa.int32(), "source": pa.int32()}))

# The only list of the recorded fields: the Arrow schema, the writer, the reader and the importer all follow it.
_COLUMNS = [
    Column("episode", _TEXT, "episode.id"),
    Column("task", _TEXT, "episode.task_id"),
    Column("call", pa.int32(), "number"),
    Column("prompt", _IDS, "call.prompt"),
    Column("completion", _IDS, "call.completion"),
    Column("logprobs", _LOGPROBS, "call.logprobs", nullable=True),
    Column("stop", _TEXT, "call.stop", nullable=True),
    Column("reward", _FLOAT, "call.reward"),
    Column("trainable", pa.bool_(), "call.trainable"),
    Column("purpose", _TEXT, "call.purpose"),
    Column("policy_version", _INT, "call.policy_version"),
    Column("segments", _SEGMENTS, "call.segments"),
    # The fields of the episode are the same on each of its rows.
    Column("episode_reward", _FLOAT, "episode.reward"),
    Column("temperature", _FLOAT, "episode.sampling.temperature"),
    Column("top_p", _FLOAT, "episode.sampling.top_p"),
    Column("top_k", _INT, "episode.sampling.top_k"),
    Column("max_tokens", _INT, "episode.sampling.max_tokens", nullable=True),
    Column("seed", _INT, "episode.seed", nullable=True),
    Column("started", _FLOAT, "episode.started", nullable=True),
    Column("ended", _FLOAT, "episode.ended", nullable=True),
    Column("memory", _TEXT, "episode.memory"),
]
_VERSION = b"1"
SCHEMA = pa.schema([pa.field(c.name, c.type, c.nullable) for c in _COLUMNS], metadata={b"memopd.schema": _VERSION})
_REQUIRED = [c.name for c in _COLUMNS if not c.nullable]
_SHARED = [c.name for c in _COLUMNS if c.source.startswith("episode.")]

# A row group is a few MB, however long the calls are. The writer and the reader hold one in memory at a time.
_GROUP_TOKENS, _GROUP_CALLS = 1 << 20, 1 << 14
_UNREADABLE = (pa.ArrowException, OSError, UnicodeError, MemoryError)  # the errors that Arrow raises for damaged bytes
_MAGIC, _DIGEST_BYTES, _HASH_CHUNK = b"PAR1", 32, 1 << 20


class StoreError(ValueError):
    """Recorded calls cannot be used. The message is one line that names the file and, where possible, the row."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def write_episodes(path: str | Path, episodes: Iterable[Episode], *, overwrite: bool = False) -> int:
    """Write a store durably and return the number of episodes. If this fails, `path` stays as it was.

    `name.parquet` is one file, which is replaced only with `overwrite`. Any other path is a directory, and each call
    adds a part to it. `episodes` may be a generator of any length: one row group at a time is in memory.
    """
    path = Path(path)
    single = path.suffix == ".parquet"
    if path.is_dir() if single else path.is_file():
        raise StoreError(f"{path}: a path ending in .parquet must be a file, any other a directory")
    if single and path.exists() and not overwrite:
        raise StoreError(f"{path}: exists already; choose another name or remove it (overwrite=True from Python)")
    directory = path.parent if single else path
    created = [d for d in (directory, *directory.parents) if not d.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with temporary_folder(directory) as folder:
            temporary = folder / path.name
            with temporary.open("x+b") as file:
                written = _write(file, path, episodes)
                _seal(file)
            sync(temporary)
            _publish(temporary, path, overwrite)
        for changed in (directory, *(d.parent for d in created)):
            sync(changed)
    except BaseException:  # clean up after an interrupt too
        with suppress(OSError):  # keep a directory that another process uses by now
            for directory in created:
                directory.rmdir()
        raise
    return written


def read_episodes(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of one file, or of a directory's *.parquet in the order of their names.

    Each file is checked completely before its first episode. Token ids and log-probabilities are read-only views of
    their row group, not copies.
    """
    path = Path(path)
    if not path.exists():
        raise StoreError(f"{path}: no such file or directory")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        inside = path / "episodes"
        hint = f"; a run's episodes are in {inside}, a file per step" if any(inside.glob("*.parquet")) else ""
        raise StoreError(f"{path}: no *.parquet file in this directory{hint}")
    return _read_files(files)


def _read_files(files: list[Path]) -> Iterator[Episode]:
    file_of: dict[str, Path] = {}
    for file in files:
        for episode in _read_file(file):
            if (before := file_of.setdefault(episode.id, file)) != file:
                raise StoreError(
                    f"{file}: episode {episode.id!r} is in {before.name} already; remove one of the two files"
                )
            yield episode


def assemble(path: Path, rows: Iterable[tuple[str, Row]]) -> Iterator[Episode]:
    """Build episodes from rows. Each row comes with its place ("row 17"), which errors name.

    A row may omit fields that have a default. The rows of an episode must agree about the episode's own fields.
    """
    seen: set[str] = set()
    for id, group in groupby(rows, key=lambda placed: placed[1]["episode"]):
        calls: list[Call] = []
        shared: Row = {}
        begin = ""
        for place, row in group:
            begin = begin or place
            t = row.get("call", len(calls))
            name = f"episode {id!r}: call {t}"
            try:
                for field in _REQUIRED:
                    if field in row and row[field] is None:
                        raise ValueError(f"{field}: must not be null")
                if id in seen:
                    raise ValueError("the episode's calls must be consecutive, but those of another are in between")
                if t != len(calls):
                    raise ValueError(f"call {len(calls)} must come here: calls must be complete and in order")
                for field in _SHARED:
                    if field in row and shared.setdefault(field, row[field]) != row[field]:
                        raise ValueError(f"{field}: {row[field]!r} here, {shared[field]!r} earlier in the episode")
                calls.append(_call(name, row))
            except ValueError as error:
                raise _located(path, place, name, error) from None
        seen.add(id)
        try:
            episode = _episode(id, calls, shared)
        except ValueError as error:
            raise _located(path, begin, f"episode {id!r}", error) from None
        yield episode


def _call(name: str, row: Row) -> Call:
    fields = _fields("call", row)
    segments = fields.pop("segments", ())
    if any(s is None or None in (s["kind"], s["start"], s["stop"]) for s in segments):
        raise ValueError("segments: kind, start and stop must not be null")
    return Call(**fields, segments=tuple(Segment(**s) for s in segments), name=name)


def _episode(id: str, calls: list[Call], shared: Row) -> Episode:
    fields = {"task_id": id} | _fields("episode", shared)  # without a task, the episode is a group of its own
    return Episode(**fields, calls=tuple(calls), sampling=Sampling(**_fields("episode.sampling", shared)))


def _fields(owner: str, row: Row) -> dict[str, Any]:
    sources = ((c.name, *c.source.rpartition(".")) for c in _COLUMNS)
    return {field: row[name] for name, of, _, field in sources if of == owner and name in row}


def _located(path: Path, place: str, name: str, error: Exception) -> StoreError:
    message = str(error)  # errors of `Call` and `Episode` begin with the name already
    return StoreError(f"{path}: {place}: " + (message if message.startswith(name) else f"{name}: {message}"))


def _write(file: BufferedRandom, path: Path, episodes: Iterable[Episode]) -> int:
    seen: set[str] = set()
    group: list[Episode] = []
    calls = tokens = 0
    with pq.ParquetWriter(
        file,
        SCHEMA,
        compression="zstd",
        use_dictionary=[column.name for column in _COLUMNS if column.type == _TEXT],
        use_byte_stream_split=["logprobs.list.element"],
        write_page_checksum=True,
    ) as writer:
        for episode in episodes:
            if episode.id in seen:
                raise StoreError(f"{path}: episode {episode.id!r}: given twice")
            seen.add(episode.id)
            group.append(episode)
            calls += len(episode.calls)
            tokens += sum(len(c.prompt) + len(c.completion) for c in episode.calls)
            if calls >= _GROUP_CALLS or tokens >= _GROUP_TOKENS:
                writer.write_batch(_batch(path, group))
                group, calls, tokens = [], 0, 0
        if group:
            writer.write_batch(_batch(path, group))
    return len(seen)


def _batch(path: Path, episodes: list[Episode]) -> Any:
    rows = [SimpleNamespace(episode=e, number=t, call=c) for e in episodes for t, c in enumerate(e.calls)]
    arrays = []
    for column in _COLUMNS:
        try:
            array = _array(list(map(attrgetter(column.source), rows)), column.type)
            if array.null_count and not column.nullable:
                raise ValueError("must not be None")
        except (ValueError, TypeError, OverflowError) as error:
            for episode in episodes if len(episodes) > 1 else ():
                _batch(path, [episode])  # raises for the episode with the wrong value
            raise StoreError(f"{path}: episode {episodes[0].id!r}: {column.name}: {error}") from None
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _array(values: list[Any], type_: Any) -> Any:
    if type_ == _SEGMENTS:
        values = [[asdict(segment) for segment in segments] for segments in values]
    if type_ not in (_IDS, _LOGPROBS):
        return pa.array(values, type_, from_pandas=True)  # reads a NaN as null: an unknown time
    offsets = np.cumsum([0] + [0 if v is None else len(v) for v in values], dtype=np.int32)
    flat = np.concatenate([np.empty(0, type_.value_type.to_pandas_dtype()), *(v for v in values if v is not None)])
    return pa.ListArray.from_arrays(offsets, pa.array(flat), mask=pa.array([v is None for v in values]))


def _seal(file: BufferedRandom) -> None:
    """Put the digest between the row groups and the footer of a finished Parquet file."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").digest()
    file.seek(-8, os.SEEK_END)
    file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
    cut = file.tell()
    footer = file.read()
    file.seek(cut)
    file.write(digest + footer)
    file.flush()


def _publish(temporary: Path, path: Path, overwrite: bool) -> None:
    if path.suffix != ".parquet":
        numbers = [int(p.stem[5:]) for p in path.glob("part-*.parquet") if p.stem[5:].isdecimal()]
        parts = (path / f"part-{n:05d}.parquet" for n in count(max(numbers, default=-1) + 1))
        while not _rename_new(temporary, next(parts)):
            pass  # another writer took this number
    elif overwrite:
        os.replace(temporary, path)
    elif not _rename_new(temporary, path):
        raise StoreError(f"{path}: another process wrote it meanwhile; pass overwrite=True to replace it")


def _rename_new(temporary: Path, target: Path) -> bool:
    """Rename without replacing an existing file, which os.replace would do. Return whether it worked."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if target.exists():
            return False
        os.replace(temporary, target)
    temporary.unlink(missing_ok=True)
    return True


def _read_file(path: Path) -> Iterator[Episode]:
    try:
        source = pa.OSFile(str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error}") from None
    with source:
        episodes = assemble(path, _rows(path, source))
        intact = _intact(path, source)
        try:
            if intact:
                yield from episodes
            else:
                deque(episodes, maxlen=0)  # prefer an error about a row or the schema, which says more
        except _UNREADABLE as error:
            if intact:
                raise StoreError(f"{path}: cannot be read as Parquet: {error}") from None
        if not intact:
            raise StoreError(
                f"{path}: checksum does not match: the file is damaged, or another program wrote it; restore it "
                "from a copy, or import an intended change as JSON lines (memopd.record.import_calls)"
            )


def _intact(path: Path, source: Any) -> bool:
    size = source.size()
    if size < 12 or source.read_at(4, 0) != _MAGIC:
        raise StoreError(f"{path}: not a Parquet file: it does not begin with PAR1 ({size} bytes)")
    tail = source.read_at(8, size - 8)
    if tail[4:] != _MAGIC:
        raise StoreError(f"{path}: truncated or damaged: it does not end with PAR1; restore it from a copy")
    cut = size - 8 - int.from_bytes(tail[:4], "little")
    sealed = cut - _DIGEST_BYTES
    if sealed < len(_MAGIC):
        return False
    digest = hashlib.sha256()
    for start, stop in ((0, sealed), (cut, size)):
        for at in range(start, stop, _HASH_CHUNK):
            digest.update(source.read_at(min(_HASH_CHUNK, stop - at), at))
    return bool(digest.digest() == source.read_at(_DIGEST_BYTES, sealed))


def _rows(path: Path, source: Any) -> Iterator[tuple[str, Row]]:
    file = pq.ParquetFile(source, page_checksum_verification=True)
    _check_schema(path, file.schema_arrow)
    row = 0
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(_GROUP_CALLS, row_groups=[group]):
            for values in zip(*(_values(batch.column(name)) for name in SCHEMA.names), strict=True):
                yield f"row {row}", dict(zip(SCHEMA.names, values, strict=True))
                row += 1


def _values(column: Any) -> list[Any]:
    if column.type not in (_IDS, _LOGPROBS):
        return list(column.to_pylist())
    # `Call` then refuses a null id as negative and a null log-probability as not finite.
    flat = (column.values.fill_null(-1) if column.type == _IDS else column.values).to_numpy(zero_copy_only=False)
    values: list[Any] = [flat[start:stop] for start, stop in pairwise(column.offsets.to_pylist())]
    for null in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) if column.null_count else ():
        values[null] = None
    return values


def _check_schema(path: Path, schema: Any) -> None:
    version = (schema.metadata or {}).get(b"memopd.schema")
    if version != _VERSION:
        raise StoreError(f"{path}: not an episode store of version 1: its metadata has memopd.schema {version!r}")
    found, wanted = ({field.name: field.type for field in fields} for fields in (schema, SCHEMA))
    for name in wanted | found:
        actual, expected = found.get(name, "missing"), wanted.get(name, "missing")
        if actual != expected:
            raise StoreError(f"{path}: another schema: column {name!r} is {actual}, must be {expected}")
    if len(found) < len(schema):
        raise StoreError(f"{path}: another schema: two columns have the same name")
