"""The run directory's stages: seconds in the metrics, and on a terminal what is going on."""

import sys
import time

import pytest

from memopd.train.log import Run


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
