"""Files appear whole or not at all; JSON lines are read, or the bad line is named."""

import fcntl
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memopd.files import (
    check_digests,
    digests,
    json_lines,
    remove_leftovers,
    temporary_folder,
    whole,
    whole_folder,
    write_digests,
)


def test_the_file_appears_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "x.txt"
    with whole(path) as partial:
        partial.write_text("all of it")
        assert not path.exists()
    assert path.read_text() == "all of it"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), whole(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_an_error_names_the_path_that_was_given(tmp_path):
    """Not one in a temporary folder, which is gone when the error is read."""
    path = tmp_path / "no folder" / "x.txt"
    for write in (whole, whole_folder):
        with pytest.raises(FileNotFoundError) as caught, write(path) as partial:
            (partial / "in" / "it").write_text("")
        assert Path(caught.value.filename) == path / "in" / "it"
    with pytest.raises(OSError, match="File name too long") as caught, whole(tmp_path / ("x" * 300)) as partial:
        partial.touch()
    assert caught.value.filename == str(tmp_path / ("x" * 300))
    with pytest.raises(FileNotFoundError) as caught, temporary_folder(Path("/proc/self")):  # may not have new folders
        pass
    assert caught.value.filename == "/proc/self"
    with pytest.raises(FileNotFoundError) as caught, whole(path):  # an error about another file is as it was
        (tmp_path / "another").read_text()
    assert caught.value.filename == str(tmp_path / "another")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path, suffix):
    data = (
        '\ufeff{"a": 1}\r\n\n  \n{"a": [NaN], "é": {"a": 2}}'.encode()
    )  # a byte-order mark, blank lines, no last newline
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    (one, first), (four, second) = json_lines(path)
    assert (one, first, four) == (1, {"a": 1}, 4)
    assert json.dumps(second, ensure_ascii=False) == '{"a": [NaN], "é": {"a": 2}}'
    assert [n for n, _ in json_lines(path, finished=True)] == [1]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"{", "line 3: not a line of JSON: Expecting"),
        (b"\xff\xfe", "line 3: not a line of JSON: not UTF-8"),
        (b"[" * 100_000, "line 3: not a line of JSON: "),
        (b"[1]", "line 3: must be a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "line 3: not a line of JSON: 'c' is given twice"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path, bad, complaint):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + bad + b"\n{}\n")
    rows = json_lines(path)
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(ValueError, match=r".") as caught:
        next(rows)
    assert str(caught.value).startswith(f"{path}: {complaint}")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_of_lines_that_is_cut_off(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 3)[:-4])
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: line 4: cannot be read: .* cut off or damaged"):
        list(json_lines(path))


def test_a_durable_file_is_synced_before_it_has_its_name_and_its_folder_after(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "x.txt", [], os.fsync

    def recorded(handle):
        seen.append((Path(os.readlink(f"/proc/self/fd/{handle}")), path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    with whole(path) as partial:
        partial.write_text("not durable")
    assert seen == []
    path.unlink()
    with whole(path, durable=True) as partial:
        partial.write_text("durable")
    (file, before), (folder, after) = seen
    assert (file.name, before) == ("x.txt", False)
    assert (folder, after) == (tmp_path, True)


def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), whole(path, durable=True) as partial:
        partial.write_text("new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


# ---- digests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def digested(tmp_path):
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}\n")
    (folder / "model.safetensors").write_bytes(bytes(range(40)))
    (folder / "deep" / "notes.txt").write_text("é")
    write_digests(folder)
    return folder


def test_digests_are_those_that_sha256sum_prints(digested):
    check_digests(digested)
    assert digests(digested).keys() == {"config.json", "model.safetensors", "deep/notes.txt"}
    assert digests(digested)["config.json"] == "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    assert json.loads((digested / "digests.json").read_text()) == digests(digested)


def test_a_flipped_bit_is_noticed(digested):
    """In the files, and in the digests themselves: every 7th bit, so that each place in a byte has its turn."""
    for file in sorted(f for f in digested.rglob("*") if f.is_file()):
        data = file.read_bytes()
        for bit in range(0, 8 * len(data), 7):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            with pytest.raises(ValueError, match=r"delete .*digests\.json if you changed it on purpose") as caught:
                check_digests(digested)
            assert "\n" not in str(caught.value)
        file.write_bytes(data)
    check_digests(digested)


def test_a_missing_or_exchanged_file_is_noticed(digested):
    one, other = digested / "config.json", digested / "model.safetensors"
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(ValueError, match=r"config\.json: damaged"):
        check_digests(digested)
    one.write_bytes(kept)
    check_digests(digested, skip="*.safetensors")  # a reader of the tokenizer does not read the weights
    other.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: missing"):
        check_digests(digested)


def test_the_way_out_that_the_error_names(digested):
    (digested / "README.md").write_text("added later")
    check_digests(digested)
    (digested / "config.json").write_text('{"edited": "on purpose"}')
    with pytest.raises(ValueError, match=r"or delete .*/digests\.json"):
        check_digests(digested)
    (digested / "digests.json").unlink()
    check_digests(digested)


# ---- what killed processes leave ------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from memopd.files import whole, whole_folder
path, kind = Path(sys.argv[1]), sys.argv[2]
with {"file": whole, "folder": whole_folder}[kind](path) as partial:
    (partial if kind == "file" else partial / "inside").write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def writing(path: Path, kind: str) -> Iterator[subprocess.Popen]:
    """A process that is in the middle of writing, until it is killed or gets a line."""
    command = [sys.executable, "-c", WRITER, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_removes_what_a_killed_one_left(kind, tmp_path):
    path = tmp_path / "x"
    with writing(path, kind) as process:
        process.kill()
        process.wait()
        (left,) = tmp_path.iterdir()
        assert [f.read_text() for f in left.rglob("*") if f.is_file()] == ["half"]
        with whole(tmp_path / "y") as partial:  # any writer to this place
            assert not left.exists()
            partial.write_text("all of it")
    assert [p.name for p in tmp_path.iterdir()] == ["y"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_live_writer_uses_stays(kind, tmp_path):
    path = tmp_path / "x"
    with writing(path, kind) as process:
        for _ in range(3):
            with whole(path) as partial:
                partial.write_text("of the second writer")
            path.unlink()
            remove_leftovers(tmp_path)
        process.communicate("go on\n")
        assert process.returncode == 0
    assert (path if kind == "file" else path / "inside").read_text() == "half"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_only_temporary_folders_are_removed(tmp_path):
    kept = [".memopd", ".memopd-notes", f".memopd-{'g' * 32}", f"memopd-{'0' * 32}"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / f".memopd-{'0' * 32}").mkdir()
    (tmp_path / f".memopd-{'1' * 32}").write_text("a file, which we never leave")
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, f".memopd-{'1' * 32}"])


@pytest.mark.parametrize("when", ["before the lock", "while another holds it"])
def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(when, tmp_path, monkeypatch):
    lock, seen = fcntl.flock, []

    def after_another_process(handle, operation):
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        if len(seen) == 1:
            seen[0].rmdir()
            if when == "while another holds it":
                raise BlockingIOError
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_process)
    with whole(tmp_path / "x") as partial:
        partial.write_text("all of it")
    assert len(seen) == 2
    assert (tmp_path / "x").read_text() == "all of it"


def test_threads_that_write_to_one_place_do_not_remove_each_others_files(tmp_path):
    def write(number: int) -> None:
        for turn in range(20):
            with whole(tmp_path / f"{number}-{turn}") as partial:
                partial.write_text(f"{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(list(tmp_path.iterdir())) == 160
    assert all(p.read_text() == p.name.split("-")[0] for p in tmp_path.iterdir())


def test_a_file_system_without_locks_keeps_leftovers(tmp_path, monkeypatch):
    def unsupported(handle, operation):
        raise OSError(95, "Operation not supported")

    (tmp_path / f".memopd-{'0' * 32}").mkdir()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with whole(tmp_path / "x") as partial:
        partial.write_text("all of it")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".memopd-{'0' * 32}", "x"]


def test_files_of_safetensors_are_as_readable_as_others(tmp_path):
    (tmp_path / "usual").touch()
    with whole(tmp_path / "alone.safetensors") as partial:
        save_file({"a": torch.ones(2)}, partial)
    with whole_folder(tmp_path / "model") as folder:
        save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    modes = {file.stat().st_mode for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {(tmp_path / "usual").stat().st_mode}


def test_a_folder_replaces_another_or_is_refused(tmp_path):
    path = tmp_path / "x"
    for content in ("old", "new"):
        with whole_folder(path) as partial:
            (partial / content).touch()
    assert [p.name for p in path.iterdir()] == ["new"]
    with pytest.raises(ValueError, match=r"x: already exists; remove it first"), whole_folder(path, replace=False):
        pass
    with pytest.raises(RuntimeError), whole_folder(path):
        raise RuntimeError
    assert [p.name for p in path.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
