"""Files appear whole or not at all; JSON lines are read, or the bad line is named."""

import gzip
import json
import os
from pathlib import Path

import pytest

from memopd.files import check_digests, digests, json_lines, whole, write_digests


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
    assert (file.parent, before) == (tmp_path, False)
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


def test_every_flipped_bit_is_noticed(digested):
    """In the files, and in the digests themselves."""
    for file in sorted(f for f in digested.rglob("*") if f.is_file()):
        data = file.read_bytes()
        for bit in range(8 * len(data)):
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
