"""The store returns what you wrote; damage, foreign files and bad rows raise an error of one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd.record import StoreError, read_episodes, store, write_episodes
from memopd.types import Call, Episode, Sampling, Segment, StopReason

Rows = list[dict[str, Any]]


def episodes(count: int = 4, calls: int = 3) -> list[Episode]:
    rng = np.random.default_rng(7)
    return [
        Episode(
            f"e{i}",
            f"task-{i // 2}",
            [
                Call(
                    prompt=rng.integers(0, 150_000, 20 + t),
                    completion=rng.integers(0, 150_000, 5),
                    logprobs=-rng.random(5) if i % 2 else None,
                    stop=StopReason.STOP if t else None,
                    reward=t / 3,
                    trainable=t != 1,
                    purpose="act",
                    policy_version=i,
                    segments=[Segment("prefix", 0, 10), Segment("memory", 10, 15, source=0)],
                )
                for t in range(calls)
            ],
            reward=1.5,
            sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=5 if i else None),
            seed=i or None,
            started=1.25,
            ended=None,
            memory="mem1",
        )
        for i in range(count)
    ]


def error_of(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        list(read_episodes(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


# Reading returns what was written.

finite = st.floats(allow_nan=False, allow_infinity=False)
int64 = st.integers(-(2**63), 2**63 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)


@st.composite
def any_call(draw: st.DrawFn) -> Call:
    prompt, completion = draw(token_ids), draw(token_ids)
    spans = draw(st.lists(st.lists(st.integers(0, len(prompt)), min_size=2, max_size=2).map(sorted), max_size=3))
    logprobs = st.lists(finite, min_size=len(completion), max_size=len(completion))
    return Call(
        prompt,
        completion,
        draw(st.none() | logprobs),
        stop=draw(st.none() | st.sampled_from(StopReason)),
        reward=draw(finite),
        trainable=draw(st.booleans()),
        purpose=draw(st.text(max_size=5)),
        policy_version=draw(int64),
        segments=tuple(
            Segment(draw(st.sampled_from(["prefix", "memory", "observation"])), *span, draw(st.none() | st.just(3)))
            for span in spans
        ),
    )


any_sampling = st.builds(
    Sampling,
    temperature=st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31),
    max_tokens=st.none() | st.integers(1, 2**31),
)
any_episode = st.builds(
    Episode,
    id=st.text(min_size=1),
    task_id=st.text(),
    calls=st.lists(any_call(), min_size=1, max_size=4),
    reward=finite,
    sampling=any_sampling,
    seed=st.none() | int64,
    started=st.none() | finite,
    ended=st.none() | finite,
    memory=st.text(max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(given_=st.lists(any_episode, max_size=4, unique_by=lambda e: e.id), group=st.integers(1, 6))
def test_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, given_: list[Episode], group: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_GROUP_CALLS", group)  # several row groups, episodes larger than a batch
        assert write_episodes(path, iter(given_), overwrite=True) == len(given_)
        assert list(read_episodes(path)) == given_


def test_calls_read_are_immutable_and_know_their_names(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.parquet", episodes())
    call = list(read_episodes(tmp_path / "e.parquet"))[1].calls[2]
    assert call.name == "episode 'e1': call 2"
    assert call.prompt.dtype == np.int32
    assert call.logprobs is not None
    assert not any(array.flags.writeable for array in (call.prompt, call.completion, call.logprobs))


def test_a_time_that_is_nan_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    write_episodes(path, [Episode("a", "t", [Call([1], [2]), Call([1], [2])], started=float("nan"))])
    assert next(read_episodes(path)).started is None


def test_plain_pyarrow_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    write_episodes(path, episodes())
    table = pq.read_table(path, page_checksum_verification=True)
    assert table.num_rows == 12
    assert table.column_names == store.SCHEMA.names
    assert table.schema.metadata[b"memopd.schema"] == b"1"
    row = table.slice(4, 1).to_pylist()[0]
    call = episodes()[1].calls[1]
    assert (row["episode"], row["task"], row["call"], row["reward"]) == ("e1", "task-0", 1, 1 / 3)
    assert row["prompt"] == call.prompt.tolist()
    assert row["segments"][1] == {"kind": "memory", "start": 10, "stop": 15, "source": 0}


def test_every_field_of_the_types_has_one_column() -> None:
    held = {"call": Call, "episode": Episode, "episode.sampling": Sampling}
    kept = [f"{name}.{f.name}" for name, type_ in held.items() for f in fields(type_)]
    kept = [f for f in kept if f not in ("call.name", "episode.calls", "episode.sampling")]  # "number" stands for calls
    assert sorted(column.source for column in store._COLUMNS) == sorted([*kept, "number"])


# Directories and names.


def test_a_directory_gets_one_part_per_write(tmp_path: Path) -> None:
    path, given_ = tmp_path / "runs" / "episodes", episodes()
    write_episodes(path, given_[:2])
    write_episodes(path, given_[2:], overwrite=True)
    assert sorted(p.name for p in path.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert list(read_episodes(path)) == given_
    (path / "part-00000.parquet").unlink()
    write_episodes(path, given_[:1])
    assert [e.id for e in read_episodes(path)] == ["e2", "e3", "e0"]


def test_writers_at_the_same_time_take_a_part_each(tmp_path: Path) -> None:
    given_ = episodes(count=12, calls=1)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda episode: write_episodes(tmp_path / "d", [episode]), given_))
    assert len(list((tmp_path / "d").iterdir())) == 12
    assert sorted(e.id for e in read_episodes(tmp_path / "d")) == sorted(e.id for e in given_)


def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path, given_ = tmp_path / "e.parquet", episodes()
    write_episodes(path, given_)
    with pytest.raises(StoreError, match="exists already; choose another name"):
        write_episodes(path, given_[:1])
    assert list(read_episodes(path)) == given_
    write_episodes(path, given_[:1], overwrite=True)
    assert list(read_episodes(path)) == given_[:1]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path, given_ = tmp_path / "e.parquet", episodes()

    def slow() -> Iterator[Episode]:
        yield given_[0]
        write_episodes(path, given_)

    with pytest.raises(StoreError, match="wrote it meanwhile"):
        write_episodes(path, slow())
    assert list(read_episodes(path)) == given_
    assert os.listdir(tmp_path) == ["e.parquet"]


def test_without_hard_links_a_rename_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    for _ in range(2):
        write_episodes(tmp_path / "d", episodes())
    assert sorted(os.listdir(tmp_path / "d")) == ["part-00000.parquet", "part-00001.parquet"]


def test_a_file_where_a_directory_must_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "d.parquet").mkdir()
    for path in (tmp_path / "file", tmp_path / "d.parquet"):
        with pytest.raises(StoreError, match="must be a file, any other a directory"):
            write_episodes(path, episodes())


# All or nothing.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["e.parquet", "new/deep/e.parquet", "new/parts"])
def test_a_crash_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]
) -> None:
    monkeypatch.setattr(store, "_GROUP_CALLS", 1)

    def crash() -> Iterator[Episode]:
        yield from episodes()
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        write_episodes(tmp_path / name, crash())
    assert os.listdir(tmp_path) == []


def test_a_failing_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, given_ = tmp_path / "e.parquet", episodes()
    write_episodes(path, given_)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_episodes(path, given_[:1], overwrite=True)
    assert os.listdir(tmp_path) == ["e.parquet"]
    assert list(read_episodes(path)) == given_


def test_a_killed_writer_leaves_no_episodes(tmp_path: Path) -> None:
    program = """
import os, sys
from memopd.record import write_episodes
from memopd.types import Call, Episode

def killed():
    yield Episode("e0", "t", [Call([1], [2])])
    os._exit(9)

write_episodes(sys.argv[1], killed())
"""
    path = tmp_path / "d"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 9
    assert error_of(path) == "no *.parquet file in this directory"
    write_episodes(path, episodes())
    assert list(read_episodes(path)) == episodes()


def test_an_episode_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="episode 'e0': given twice"):
        write_episodes(tmp_path / "e.parquet", [*episodes(), episodes()[0]])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("culprit", "message"),
    [
        (Episode("bad", "t", [Call([1], [2])], seed=2**64), "episode 'bad': seed: "),
        (Episode("bad", "t", [Call([1], [2], policy_version="v1")]), "episode 'bad': policy_version: "),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_named(tmp_path: Path, culprit: Episode, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        write_episodes(tmp_path / "e.parquet", [*episodes(), culprit])
    assert os.listdir(tmp_path) == []


# A row group at a time.


def test_writing_consumes_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_GROUP_TOKENS", 10_000)
    rng = np.random.default_rng(0)
    sizes = []

    def long_calls() -> Iterator[Episode]:
        for i in range(5):
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*")))
            yield Episode(f"e{i}", "t", [Call(rng.integers(0, 2**31, 20_000), [1])])

    write_episodes(tmp_path / "e.parquet", long_calls())
    assert np.all(np.diff(sizes) > 50_000)


def test_reading_yields_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_GROUP_CALLS", 3)
    path = tmp_path / "e.parquet"
    write_episodes(path, episodes())
    groups = []
    iter_batches = pq.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **rest: Any) -> Any:
        groups.append(rest["row_groups"])
        return iter_batches(self, *args, **rest)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    reader = read_episodes(path)
    assert groups == []
    assert next(reader).id == "e0"
    assert groups == [[0], [1]]  # the next episode's first row says that this one is complete


# Every flipped bit is noticed.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("written") / "e.parquet"
    write_episodes(path, episodes())
    return path.read_bytes()


def footer_start(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def assert_flips_are_noticed(path: Path, data: bytes, bits: Any) -> None:
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError) as caught:
            list(read_episodes(path))
        assert len(str(caught.value).splitlines()) == 1


def test_300_random_bit_flips(tmp_path: Path, written: bytes) -> None:
    bits = np.random.default_rng(1).choice(8 * len(written), 300, replace=False)
    assert_flips_are_noticed(tmp_path / "e.parquet", written, bits.tolist())


@pytest.mark.parametrize("region", ["magic", "page header", "digest", "footer", "schema", "footer length and magic"])
def test_bit_flips_outside_the_pages(tmp_path: Path, written: bytes, region: str) -> None:
    cut, end = footer_start(written), len(written)
    schema = written.index(b"memopd.schema")
    start, stop = {
        "magic": (0, 4),
        "page header": (4, 24),
        "digest": (cut - 32, cut),
        "footer": (cut, end - 8),
        "schema": (schema, schema + 20),
        "footer length and magic": (end - 8, end),
    }[region]
    bits = np.arange(8 * start, 8 * stop)
    if len(bits) > 160:
        bits = np.random.default_rng(2).choice(bits, 160, replace=False)
    assert_flips_are_noticed(tmp_path / "e.parquet", written, bits.tolist())


def test_truncations(tmp_path: Path, written: bytes) -> None:
    path, cut = tmp_path / "e.parquet", footer_start(written)
    for size in (0, 3, 4, 11, 12, 500, cut - 40, cut - 1, cut + 7, len(written) - 8, len(written) - 1):
        path.write_bytes(written[:size])
        assert "PAR1" in error_of(path)
    path.write_bytes(written[:100] + written[200:])
    assert error_of(path).startswith("checksum does not match")
    path.write_bytes(written + b"\0")
    assert error_of(path).startswith("truncated or damaged")


# Foreign files.


def test_a_run_directory_is_not_its_store(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_episodes(path / "episodes" / "step-000000.parquet", episodes())
    assert error_of(path) == (
        f"no *.parquet file in this directory; a run's episodes are in {path / 'episodes'}, a file per step"
    )
    assert list(read_episodes(path / "episodes")) == episodes()


def test_files_that_are_no_stores(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    assert error_of(path) == "no such file or directory"
    path.mkdir()
    assert error_of(path) == "no *.parquet file in this directory"
    path.rmdir()
    path.write_text('{"episode": "e0"}' * 9)
    assert error_of(path).startswith("not a Parquet file")


def test_another_schema(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "e.parquet"
    path.write_bytes(written)
    table = pq.read_table(path)

    def error(other: pa.Table) -> str:
        pq.write_table(other, path)
        return error_of(path)

    assert "memopd.schema None" in error(pa.table({"a": [1]}))
    assert "memopd.schema b'2'" in error(table.replace_schema_metadata({"memopd.schema": "2"}))
    assert error(table.drop_columns("seed")) == "another schema: column 'seed' is missing, must be int64"
    assert error(table.append_column("more", table["call"])).endswith("'more' is int32, must be missing")
    assert error(table.append_column("seed", table["seed"])) == "another schema: two columns have the same name"
    wide = table.set_column(3, "prompt", table["prompt"].cast(pa.list_(pa.int64())))
    assert error(wide).startswith("another schema: column 'prompt' is list<element: int64>")


def test_rewritten_by_another_program(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "e.parquet"
    path.write_bytes(written)
    pq.write_table(pq.read_table(path), path)
    message = error_of(path)
    assert message.startswith("checksum does not match: the file is damaged, or another program wrote it; ")
    assert "import_calls" in message


# Bad rows are named, whether or not the digest is right.


def put(row: int, column: str, value: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [*rows[:row], {**rows[row], column: value}, *rows[row + 1 :]]


def order(*places: int) -> Callable[[Rows], Rows]:
    return lambda rows: [rows[i] for i in places]


BAD_ROWS: list[tuple[Callable[[Rows], Rows], str]] = [
    (put(5, "completion", []), "row 5: episode 'e1': call 2: completion: must not be empty"),
    (put(0, "prompt", []), "row 0: episode 'e0': call 0: prompt: must not be empty"),
    (put(4, "prompt", [3, -1]), "row 4: episode 'e1': call 1: prompt: negative token id -1 at 1"),
    (put(4, "prompt", [3, None]), "row 4: episode 'e1': call 1: prompt: negative token id -1 at 1"),
    (put(4, "prompt", None), "row 4: episode 'e1': call 1: prompt: must not be null"),
    (put(4, "logprobs", [-0.5]), "row 4: episode 'e1': call 1: logprobs: 1 given for 5 sampled tokens"),
    (put(4, "logprobs", [-0.5] * 4 + [None]), "row 4: episode 'e1': call 1: logprobs: not finite at 4"),
    (put(7, "reward", float("nan")), "row 7: episode 'e2': call 1: reward: must be a finite number, got nan"),
    (put(7, "reward", None), "row 7: episode 'e2': call 1: reward: must not be null"),
    (put(7, "stop", "tired"), "row 7: episode 'e2': call 1: stop: must be stop, length or aborted, got 'tired'"),
    (put(7, "trainable", None), "row 7: episode 'e2': call 1: trainable: must not be null"),
    (put(7, "episode", None), "row 7: episode None: call 1: episode: must not be null"),
    (put(7, "call", None), "row 7: episode 'e2': call None: call: must not be null"),
    (put(0, "episode", ""), "row 0: episode '': Episode.id must be a non-empty string, got ''"),
    (put(8, "segments", None), "row 8: episode 'e2': call 2: segments: must not be null"),
    (put(8, "segments", [None]), "row 8: episode 'e2': call 2: segments: kind, start and stop must not be null"),
    (
        put(8, "segments", [{"kind": "memory", "start": None, "stop": 2, "source": None}]),
        "row 8: episode 'e2': call 2: segments: kind, start and stop must not be null",
    ),
    (
        put(8, "segments", [{"kind": "memory", "start": 0, "stop": 99, "source": None}]),
        "row 8: episode 'e2': call 2: segments: Segment(",
    ),
    (put(10, "top_p", 0.5), "row 10: episode 'e3': call 1: top_p: 0.5 here, 0.9 earlier in the episode"),
    (put(10, "task", "other"), "row 10: episode 'e3': call 1: task: 'other' here, 'task-1' earlier"),
    (order(0, 2, 1), "row 1: episode 'e0': call 2: call 1 must come here"),
    (order(0, 2), "row 1: episode 'e0': call 2: call 1 must come here"),
    (order(0, 1, 2, 4, 5), "row 3: episode 'e1': call 1: call 0 must come here"),
    (order(0, 0), "row 1: episode 'e0': call 0: call 1 must come here"),
    (order(0, 1, 3, 4, 5, 2), "row 5: episode 'e0': call 2: the episode's calls must be consecutive"),
    (
        lambda rows: [{**row, "temperature": -1.0} for row in rows],
        "row 0: episode 'e0': Sampling.temperature must be above 0 and finite, got -1.0",
    ),
]


@pytest.mark.parametrize(("edit", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_bad_row_is_named(
    tmp_path: Path, written: bytes, edit: Callable[[Rows], Rows], message: str, sealed: bool
) -> None:
    path = tmp_path / "e.parquet"
    path.write_bytes(written)
    lenient = pa.schema([field.with_nullable(True) for field in store.SCHEMA], metadata=store.SCHEMA.metadata)
    table = pa.Table.from_pylist(edit(pq.read_table(path).to_pylist()), schema=lenient)
    pq.write_table(table, path, row_group_size=4)
    if sealed:
        with path.open("r+b") as file:
            store._seal(file)
    assert error_of(path).startswith(message)


def test_an_episode_in_two_parts_is_named_with_what_to_do(tmp_path: Path) -> None:
    for _ in range(2):
        write_episodes(tmp_path / "store", episodes())
    with pytest.raises(StoreError, match=r"part-00001.parquet: episode 'e0' is in part-00000.parquet already; remove"):
        list(read_episodes(tmp_path / "store"))
