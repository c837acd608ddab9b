"""`memopd index` and `memopd serve retrieval` as a person meets them."""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import typer
from ties import tied_passages
from typer.testing import CliRunner

from memopd import __version__
from memopd.cli import retrieval
from memopd.retrieval import build_index, open_index, write_corpus

app = typer.Typer()
app.add_typer(retrieval.index, name="index")
app.add_typer(retrieval.serve, name="serve")

SERVE = [sys.executable, "-c", "from memopd.cli.retrieval import retrieval; import typer; typer.run(retrieval)"]


def memopd(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("command") / "corpus.jsonl"
    write_corpus(path, tied_passages(300))
    return path


@pytest.fixture(scope="module")
def folder(corpus):
    build_index(corpus, corpus.with_name("index"))
    return corpus.with_name("index")


def test_build_and_info(corpus, tmp_path):
    done = memopd("index", "build", corpus, "-o", tmp_path / "deep" / "index")
    assert (done.exit_code, done.output) == (0, f"{tmp_path / 'deep' / 'index'}: 300 passages\n")
    assert len(open_index(tmp_path / "deep" / "index").search(["amber"], 3)[0]) == 3
    info = json.loads(memopd("index", "info", tmp_path / "deep" / "index", "--json").output)
    assert (info["kind"], info["passages"], info["skipped"]) == ("lexical", 300, 0)
    assert info["corpus_sha256"] == sha256(corpus.read_bytes()).hexdigest()
    assert set(info["versions"]) == {"memopd", "tantivy"}
    assert info["bytes"] > 1000


def test_info_for_a_person(folder):
    shown = memopd("index", "info", folder).output
    assert "passages       300" in shown
    assert "lexical" in shown


def test_skipped_rows_are_counted(corpus, tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(corpus.read_bytes() + b"{\n[]\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl: line 301: not a line of JSON"):
        memopd("index", "build", tmp_path / "corpus.jsonl", "-o", tmp_path / "index")
    done = memopd("index", "build", tmp_path / "corpus.jsonl", "-o", tmp_path / "index", "--skip-bad")
    assert done.output == f"{tmp_path / 'index'}: 300 passages, 2 malformed rows skipped\n"


def test_an_index_appears_whole_or_not_at_all(corpus, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(corpus.read_bytes() + b"{\n")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    for name, why in (("bad", "line 301"), ("empty", "contains no passages")):
        with pytest.raises(ValueError, match=why):
            memopd("index", "build", tmp_path / f"{name}.jsonl", "-o", tmp_path / "index")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "empty.jsonl"]


def test_what_exists_is_refused(corpus, folder, tmp_path):
    before = sorted(folder.iterdir())
    (tmp_path / "file").write_text("mine")
    for taken in (folder, tmp_path / "file"):
        with pytest.raises(ValueError, match="already exists; remove it first or choose another name"):
            memopd("index", "build", corpus, "-o", taken)
    assert sorted(folder.iterdir()) == before


def test_what_is_no_index(tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "memopd-index.json").write_text("{}")
    for name, why in (("none", "no such folder"), (".", "not an index"), ("damaged", "build the index again")):
        for verb in (["index", "info"], ["serve", "retrieval"]):
            with pytest.raises(ValueError, match=why):
                memopd(*verb, tmp_path / name)


def test_an_index_without_its_files(corpus, tmp_path):
    build_index(corpus, tmp_path / "index")
    (tmp_path / "index" / "meta.json").write_text("{}")
    (tmp_path / "index" / "digests.json").unlink()  # as in indexes of older versions
    with pytest.raises(ValueError, match="cannot be opened"):
        open_index(tmp_path / "index")


def test_a_flipped_bit_in_any_file_of_an_index_is_noticed(corpus, tmp_path):
    build_index(corpus, tmp_path / "index")
    files = [file for file in (tmp_path / "index").iterdir() if file.stat().st_size and file.name != "digests.json"]
    assert {".store", ".idx", ".term", ".fieldnorm"} <= {file.suffix for file in files}
    for file in files:
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(ValueError, match="damaged"):
            open_index(tmp_path / "index")
        file.write_bytes(before)
    assert open_index(tmp_path / "index").search(["town"], 1)


def test_serve(folder):
    with subprocess.Popen([*SERVE, folder, "--port", "0", "--topk", "2"], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            url = line.split(": ")[0]
            assert line == f"{url}: 300 passages, lexical\n"
            assert url.startswith("http://127.0.0.1:")
            assert len(httpx.post(url, json={"queries": ["amber"]}).json()["result"][0]) == 2
            assert len(open_index(url).search(["amber"], 5)[0]) == 5
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def test_a_source_tree_without_an_installation(corpus, tmp_path):
    """With nothing but PYTHONPATH: every installed package except memopd itself, whose metadata is not there."""
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "memopd" not in path.name:
            (site / path.name).symlink_to(path)
    source = str(Path(retrieval.__file__).parents[2])
    python = [os.path.realpath(sys.executable), "-s"]
    environment = {"PYTHONPATH": os.pathsep.join([source, str(site)]), "PATH": os.environ["PATH"]}
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    check = "import importlib.metadata as m; m.version('memopd')"
    assert "PackageNotFoundError" in subprocess.run([*python, "-c", check], **options).stderr
    build = ["-m", "memopd.cli", "index", "build", str(corpus), "-o", "index"]
    done = subprocess.run([*python, *build], **options)
    assert (done.stdout, done.returncode) == ("index: 300 passages\n", 0), done.stderr
    assert json.loads((tmp_path / "index" / "memopd-index.json").read_text())["versions"]["memopd"] == __version__


def test_a_port_that_is_taken(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port} of 127.0.0.1 is in use: choose another with --port$"):
            memopd("serve", "retrieval", folder, "--port", port)


def test_other_machines_need_a_token(folder, monkeypatch):
    monkeypatch.delenv("MEMOPD_RETRIEVAL_TOKEN", raising=False)
    with pytest.raises(ValueError, match="set MEMOPD_RETRIEVAL_TOKEN to a secret"):
        memopd("serve", "retrieval", folder, "--host", "0.0.0.0")


def test_nothing_heavy_is_imported_for_help():
    heavy = {"tantivy", "torch", "fastapi", "faiss", "httpx", "uvicorn", "transformers"}
    check = f"import sys, memopd.cli.retrieval, memopd.retrieval; assert not {heavy!r} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
