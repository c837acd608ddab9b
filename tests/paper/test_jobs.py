"""Processes: skipped when finished, tried twice, named when they fail, ended with whoever started them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paper import jobs
from paper.jobs import Job, run_jobs


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)


def shell(name: str, folder: Path, script: str) -> Job:
    """Finished when the file NAME is there."""
    done = folder / name
    return Job(name, lambda: ["sh", "-c", script.format(done=done)], done.exists, folder / f"{name}.log")


def test_finished_jobs_are_not_run_again(tmp_path):
    (tmp_path / "a").touch()
    failed = run_jobs([shell("a", tmp_path, "exit 1"), shell("b", tmp_path, "touch {done}")], concurrent=1).failed
    assert failed == {}
    assert not (tmp_path / "a.log").exists()
    assert (tmp_path / "b").exists()


def test_a_failure_is_tried_once_more_and_then_named_while_others_go_on(tmp_path):
    second = "if [ -e {done}.tried ]; then touch {done}; else touch {done}.tried; exit 1; fi"
    bad = "echo try >> {done}.tries; echo the disk is full; exit 3"
    work = [shell("bad", tmp_path, bad), shell("late", tmp_path, second), shell("good", tmp_path, "touch {done}")]
    failed = run_jobs(work, concurrent=2).failed
    assert failed == {"bad": "the disk is full"}
    assert (tmp_path / "bad.tries").read_text().count("try") == 2
    assert (tmp_path / "late").exists()
    assert (tmp_path / "good").exists()


def test_ending_well_without_results_is_a_failure(tmp_path):
    assert "without its results" in run_jobs([shell("a", tmp_path, "echo ok")], concurrent=1).failed["a"]


def test_a_job_starts_when_it_is_ready_and_is_left_out_if_it_never_is(tmp_path):
    """`second` waits for `first`, and does not keep `third` from starting; `fourth` waits for one that fails."""
    order = tmp_path / "order"
    script = f"echo {{done}} >> {order}; touch {{done}}"
    first, second, third, fourth = (shell(name, tmp_path, script) for name in ("first", "second", "third", "fourth"))
    bad = shell("bad", tmp_path, "echo no; exit 1")
    waiting = [replace(second, ready=(tmp_path / "first").exists), replace(fourth, ready=(tmp_path / "bad").exists)]
    made = run_jobs([*waiting, bad, third, first], concurrent=1)
    assert [Path(line).name for line in order.read_text().split()] == ["third", "first", "second"]
    assert (made.failed, made.unfinished) == ({"bad": "no"}, ["fourth"])
    assert not (tmp_path / "fourth").exists()


def test_a_job_waits_until_what_it_needs_has_ended(tmp_path):
    """`second` and `third` need `first`, which is slow. `late` needs one that fails, and says itself what it lacks."""
    order = tmp_path / "order"
    script = f"echo {{done}} >> {order}; touch {{done}}"
    first = shell("first", tmp_path, f"sleep 0.2; {script}")
    second, third, late = (shell(name, tmp_path, script) for name in ("second", "third", "late"))
    bad = shell("bad", tmp_path, "echo no; exit 1")
    needing = [replace(job, needs=("first",)) for job in (second, third)]
    late = replace(late, command=lambda: ["sh", "-c", "echo there is no bad; exit 1"], needs=("bad",))
    made = run_jobs([*needing, late, first, bad], concurrent=3)
    assert Path(order.read_text().split()[0]).name == "first"
    assert all((tmp_path / name).exists() for name in ("second", "third"))
    assert made.failed == {"bad": "no", "late": "there is no bad"}
    run_jobs([replace(shell("fourth", tmp_path, "touch {done}"), needs=("first",)), first], concurrent=1)
    assert (tmp_path / "fourth").exists()  # what is finished keeps nobody waiting


def test_as_many_at_once_as_asked_and_no_more(tmp_path):
    """The first waits for the second: alone it would wait for ever."""
    marks = tmp_path / "marks"
    script = f"echo + >> {marks}; until [ $(grep -c + {marks}) -ge 2 ]; do sleep 0.01; done; echo - >> {marks}; "
    run_jobs([shell(str(i), tmp_path, script + "touch {done}") for i in range(4)], concurrent=2)
    running = most = 0
    for mark in marks.read_text().split():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    assert most == 2


def test_when_the_time_is_over_running_jobs_end_and_the_rest_is_named(tmp_path):
    """The first job ends by itself, the second is ended in the middle of its work, the third never starts."""
    trap = "trap 'touch {done}.asked; exit 1' TERM; touch {done}.began; while true; do sleep 0.01; done"
    work = [
        shell("quick", tmp_path, "touch {done}"),
        shell("slow", tmp_path, trap),
        shell("late", tmp_path, "touch {done}"),
    ]
    made = run_jobs(work, concurrent=1, until=time.monotonic() + 1.5)
    assert (made.failed, made.unfinished) == ({}, ["slow", "late"])
    assert [(tmp_path / name).exists() for name in ("quick", "slow.began", "slow.asked", "late")] == [
        True,
        True,
        True,
        False,
    ]
    again = run_jobs([work[0], work[2]], concurrent=1, until=time.monotonic() + 60)
    assert (again.failed, again.unfinished) == ({}, [])


def test_a_process_that_ignores_the_request_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.1)
    stubborn = shell("a", tmp_path, "trap '' TERM; echo $$ > {done}.pid; while true; do sleep 0.01; done")
    assert run_jobs([stubborn], concurrent=1, until=time.monotonic() + 1).unfinished == ["a"]
    assert not alive(int((tmp_path / "a.pid").read_text()))


PARENT = """
from pathlib import Path
from paper.jobs import Job, run_jobs
run_jobs([Job("a", lambda: ["sh", "-c", "echo $$ > {pid}; exec sleep 60"], lambda: False, Path("{pid}.log"))], 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told of its parent's end on Linux alone")
def test_children_end_with_a_killed_parent(tmp_path):
    pid = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(pid=pid)], cwd=Path(__file__).parents[2])
    child = 0
    while not child:
        time.sleep(0.02)
        child = int(pid.read_text().strip() or 0) if pid.exists() else 0
    os.kill(child, 0)  # it lives
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
