"""Files appear whole or not at all."""

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
