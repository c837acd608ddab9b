"""Files appear whole or not at all."""

import os
from pathlib import Path

import pytest

from memopd.files import whole


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
