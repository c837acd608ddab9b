"""Trackers get the metrics of metrics.jsonl, continue with a resumed run, and never stop one."""

import json
import logging
import math
import sqlite3
import sys
from importlib.util import find_spec

import pytest
from tiny import workshop

from memopd.config import RunConfig, load_config
from memopd.train.metrics import read_metrics
from memopd.train.trackers import check_trackers
from memopd.train.train import train

# A package that keeps what it is given, and fails where FAIL says so: for installations without the real ones.
PACKAGE = """
import json, os

class Run:
    def log(self, values, step):
        note("log", step=step, values=values)
    def finish(self):
        note("finish")

def note(what, **given):
    if what == os.environ.get("FAIL"):
        raise ConnectionError("no route\\n to host")
    print(what)
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps({"what": what, **given}, default=str) + "\\n")

def init(**given):
    note("init", **given)
    return Run()
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.jsonl"))
    yield lambda: [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def configured(*trackers: str, **overrides: str) -> RunConfig:
    return load_config(workshop() / "config.toml", {"run.trackers": ",".join(trackers), **overrides})


def expected(run) -> list[tuple[int, dict[str, float]]]:
    lines = [{k: v for k, v in line.items() if v is not None} for line in read_metrics(run)]
    return [(line.pop("step"), line) for line in lines]


def test_a_tracker_gets_every_step(notes, tmp_path, capsys):
    train(configured("wandb"), tmp_path / "run")
    opened, *logged, finished = notes()
    assert (opened["what"], opened["project"], opened["name"], opened["resume"]) == ("init", "memopd", "run", "allow")
    assert opened["config"]["optimise"]["lr"] == 1e-3
    assert [(n["step"], n["values"]) for n in logged] == expected(tmp_path / "run")
    assert all(math.isfinite(v) for n in logged for v in n["values"].values())
    assert finished == {"what": "finish"}
    assert capsys.readouterr().out == ""  # what a tracker prints goes to stderr


def test_a_resumed_run_continues_the_same_tracker_run(notes, tmp_path):
    for resume in (False, True):
        train(configured("wandb"), tmp_path / "run", resume)
    train(configured("wandb"), tmp_path / "other")
    first, again, other = (n["id"] for n in notes() if n["what"] == "init")
    assert first == again != other
    assert first == json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]


@pytest.mark.parametrize(("where", "calls"), [("init", []), ("log", ["init"]), ("finish", ["init", *["log"] * 3])])
def test_a_tracker_that_fails_is_reported_once_and_training_continues(
    where, calls, notes, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("FAIL", where)
    (tmp_path / "notes.jsonl").touch()
    with caplog.at_level(logging.WARNING, "memopd"):
        train(configured("wandb"), tmp_path / "run")
    assert [n["what"] for n in notes()] == calls
    assert [r.message for r in caplog.records if "run.trackers" in r.message] == [
        "run.trackers: wandb failed and gets no more metrics; metrics.jsonl has all of them "
        "(ConnectionError: no route to host)"
    ]
    assert len(read_metrics(tmp_path / "run")) == 3


def test_names_and_packages_are_checked_before_any_model_loads(tmp_path, monkeypatch):
    nothing = {"model.student": str(tmp_path / "no-model")}
    with pytest.raises(ValueError, match=r"run.trackers: 'mlflow' is not one of wandb, trackio"):
        train(configured("mlflow", **nothing), tmp_path / "run")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    for folder in (False, True):  # a folder of that name is no package: wandb writes one to the working directory
        if folder:
            (tmp_path / "trackio").mkdir()
        with pytest.raises(
            ValueError, match=r"run.trackers: trackio is not installed: pip install 'memopd\[trackio\]'"
        ):
            check_trackers(["trackio"])
    assert not (tmp_path / "run").exists()


def installed(name: str) -> bool:
    found = find_spec(name)
    return found is not None and found.origin is not None


@pytest.mark.skipif(not installed("wandb"), reason="needs wandb")
def test_wandb_offline(tmp_path, monkeypatch):
    """Both lives of the run have one id; the file of the first has the numbers of every step."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resume in (False, True):
        train(configured("wandb"), tmp_path / "run", resume)
    id = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    first, again = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert [file.name for folder in (first, again) for file in folder.glob("*.wandb")] == [f"run-{id}.wandb"] * 2
    written = (first / f"run-{id}.wandb").read_bytes()  # records of protocol buffers with values as JSON
    steps = expected(tmp_path / "run")
    assert len(steps) == 3
    for _, values in steps:
        assert json.dumps(values["grad_norm"]).encode() in written
        assert json.dumps(values["entropy"]).encode() in written


@pytest.mark.skipif(not installed("trackio"), reason="needs trackio")
def test_trackio_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    train(configured("trackio"), tmp_path / "run")
    train(configured("trackio"), tmp_path / "run", resume=True)
    id = json.loads((tmp_path / "run" / "trackers.json").read_text())["id"]
    (file,) = (tmp_path / "trackio").rglob("memopd.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {f"run-{id}"}
    assert [(step, json.loads(values)) for _, step, values in rows] == expected(tmp_path / "run")
