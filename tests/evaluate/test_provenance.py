"""Digests of what was read, the commit of the code, and a file that changed since."""

import subprocess

import pytest

from memopd.evaluate import provenance as made
from memopd.files import digest, write_digests
from memopd.version import __version__


def test_a_file_and_a_folder_are_known_by_their_content(tmp_path):
    (tmp_path / "tasks.parquet").write_bytes(b"tasks")
    assert made.identity(tmp_path / "tasks.parquet") == {
        "path": str(tmp_path / "tasks.parquet"),
        "sha256": digest(tmp_path / "tasks.parquet"),
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    before = made.content_digest(str(model))
    (model / "README.md").write_text("Nobody loads it.")
    write_digests(model)
    assert made.content_digest(str(model)) == before
    model.rename(tmp_path / "moved")
    assert made.content_digest(str(tmp_path / "moved")) == before
    (tmp_path / "moved" / "model.safetensors").write_bytes(b"weighty")
    assert made.content_digest(str(tmp_path / "moved")) != before


def test_an_index_is_known_by_its_description(tmp_path):
    (tmp_path / "memopd-index.json").write_text('{"corpus_sha256": "1"}')
    before = made.content_digest(str(tmp_path))
    (tmp_path / "passages.json").write_text("gigabytes")
    assert made.content_digest(str(tmp_path)) == before
    (tmp_path / "memopd-index.json").write_text('{"corpus_sha256": "2"}')
    assert made.content_digest(str(tmp_path)) != before


@pytest.mark.parametrize("where", ["http://127.0.0.1:1", "/nowhere/at/all", "nobody/has-this-model"])
def test_what_cannot_be_read_has_no_digest(where):
    assert made.identity(where) == {"path": where, "sha256": None}


def test_a_changed_file_is_noticed_and_a_missing_one_is_not(tmp_path, caplog):
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file in files:
        file.write_text("before")
    how = made.provenance({"turns": 6}, {"tasks": files, "model": files[0], "adapter": None})
    assert how["settings"] == {"turns": 6}
    assert "adapter" not in how["inputs"]
    assert made.changed(how) == []
    files[1].write_text("after")
    files[2].unlink()
    assert made.changed(how) == [str(files[1])]
    made.warn_changed("result.json", how)
    (line,) = caplog.messages
    assert line == f"result.json: {files[1]} has changed since: these results are of another version of it"
    made.warn_changed("old.json", {})  # an older version wrote no digests
    assert len(caplog.messages) == 1


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A source tree under git, in place of this one."""

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(made, "ROOT", tmp_path)
    for name in ("src/code.py", "paper/results/main.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    made.source.cache_clear()
    yield tmp_path, git("rev-parse", "HEAD")
    made.source.cache_clear()


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [(None, False), ("paper/results/main.json", False), ("src/code.py", True), ("src/new.py", True), ("notes", False)],
)
def test_the_commit_and_whether_code_was_changed_since(checkout, changed, dirty):
    tree, head = checkout
    if changed:
        (tree / changed).write_text("2")
    assert made.source() == {"memopd": __version__, "commit": head, "dirty": dirty}


def test_an_installed_package_has_its_version_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "ROOT", tmp_path)
    made.source.cache_clear()
    assert made.source() == {"memopd": __version__, "commit": None, "dirty": None}
    made.source.cache_clear()
