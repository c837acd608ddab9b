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
def test_a_terminal_shows_the_stage_and_its_time(tmp_path, monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Run(tmp_path, 0, None).stage("score"):
        pass
    said = capsys.readouterr()
    assert said.out == ""
    assert ("score" in said.err, "0:00:00" in said.err) == (terminal, terminal)
