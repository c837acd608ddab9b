"""The run directory's stages: seconds in the metrics, and on a terminal what is going on."""

import sys
import time
from contextlib import closing

import pytest
import torch
from tiny import recorded

from memopd.config import RunConfig
from memopd.report.curves import GROUPS, NOT_SHOWN
from memopd.train import checkpoint
from memopd.train.log import Run, open_run
from memopd.train.metrics import OURS, read_metrics


def test_a_stage_is_timed_also_if_it_fails(tmp_path):
    run = Run(tmp_path, 0, None)
    with run.stage("sample"):
        time.sleep(0.02)
    with pytest.raises(ValueError, match="no"), run.stage("score"):
        raise ValueError("no")
    with run.stage("sample"):
        time.sleep(0.02)
    assert list(run.seconds) == ["sample", "score"]
    assert run.seconds["sample"] >= 0.04


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_step_stage_and_time(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    run = Run(tmp_path, 2, None)
    assert list(run.progress("outside of a stage", "abc")) == ["a", "b", "c"]
    steps = []
    for step in run.steps(4):
        steps.append(step)
        with run.stage("check"):
            for _ in run.progress("calls alone", ["a", "b"]):
                time.sleep(0.6)  # a terminal is refreshed twice a second
            for _ in run.count("episodes", iter("abc"), 3):
                time.sleep(0.6)
    assert steps == [2, 3]
    said = capsys.readouterr()
    assert said.out == ""
    for part in ("step 3/4  check", "step 4/4  check", "calls alone 2/2", "episodes 3/3", "0:00:01"):
        assert (part in said.err) == terminal
    if not terminal:
        assert said.err == ""


def test_a_run_whose_latest_is_lost_keeps_what_it_has(tmp_path):
    """Only what came after its newest checkpoint is removed."""
    with closing(open_run(tmp_path / "run", RunConfig(), resume=False)) as run:
        for step in range(3):
            run.metrics(step, {"reward": 1.0})
            run.episodes(step, recorded())
            if step < 2:
                checkpoint.save(run.path, step + 1, {"student": {"w": torch.zeros(2)}}, keep=2)
    (tmp_path / "run" / "checkpoints" / "latest").unlink()
    with closing(open_run(tmp_path / "run", RunConfig(), resume=True)) as run:
        assert run.first == 2
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1]
    assert sorted(f.stem for f in (run.path / "episodes").iterdir()) == ["step-000000", "step-000001"]


def test_the_step_of_a_line_is_the_run_s(tmp_path):
    with closing(open_run(tmp_path / "run", RunConfig(), resume=False)) as run:
        run.metrics(3, {"step": 7.0, "reward": 1.0})
    assert read_metrics(run.path) == [{"step": 3, "reward": 1.0}]


def test_our_own_metrics_are_those_that_the_report_describes():
    """A new metric needs both: a description, and a name that a user's algorithm may not take."""
    described = {chart.key for charts in GROUPS.values() for chart in charts}
    assert described | NOT_SHOWN == OURS
