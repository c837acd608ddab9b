"""Runs commands in their own processes, several at once. A failed one is retried once; the others continue.

A job can wait for others: it starts when it is ready, and jobs that never become ready are left out.

On a machine that you have for a few minutes, give the time at which all processes must have ended. What they have
written until then must be enough for the next command to go on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

log = logging.getLogger("memopd")

POLL_SECONDS = 0.2  # between two checks of the processes
REPORT_SECONDS = 60.0  # between two lines about their progress
GRACE_SECONDS = 10.0  # from the request to end to the kill


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    command: Callable[[], Sequence[str]]  # called at every start, because it depends on the files of an earlier try
    finished: Callable[[], bool]
    log: Path  # the output of the process
    ready: Callable[[], bool] = lambda: True  # whether it can start; an evaluation waits for its training
    after: str = ""  # the job whose files it reads; while that is not finished, nobody knows if this one is
    needs: tuple[str, ...] = ()  # jobs that must have ended before it starts
    progress: Callable[[], str] = lambda: ""  # the progress in one word


@dataclass(slots=True)
class _Running:
    job: Job
    tries: int
    process: subprocess.Popen[bytes]
    file: IO[bytes]
    start: float


@dataclass(slots=True)
class Made:
    failed: dict[str, str] = field(default_factory=dict)  # name -> the last line of the output
    unfinished: list[str] = field(default_factory=list)  # the time was over, or what they wait for failed


def run_jobs(jobs: Sequence[Job], concurrent: int, until: float | None = None) -> Made:
    """Run the jobs that are not finished. At the time `until` (of `time.monotonic`), end those that still run."""
    missing = {job.name for job in jobs if not job.finished()}
    waiting = [(job, 1) for job in jobs if {job.name, job.after} & missing]
    if jobs:
        log.info("%d of %d parts exist; %d are missing", len(jobs) - len(waiting), len(jobs), len(waiting))
    running: list[_Running] = []
    made = Made()
    reported = time.monotonic()
    try:
        while waiting or running:
            if until is not None and time.monotonic() >= until:
                made.unfinished = [r.job.name for r in running] + [job.name for job, _ in waiting]
                log.info("the time is over; not finished: %s", ", ".join(made.unfinished))
                break
            while len(running) < concurrent and (i := _first_ready(waiting, running)) is not None:
                job, tries = waiting.pop(i)
                if job.name in missing or not job.finished():
                    running.append(_start(job, tries, min(concurrent, len(waiting) + len(running) + 1)))
            if not running:  # nothing is left, or the jobs that the others wait for failed
                made.unfinished = [job.name for job, _ in waiting]
                break
            time.sleep(POLL_SECONDS)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                one.file.close()
                spent = time.monotonic() - one.start
                if one.process.returncode == 0 and one.job.finished():
                    log.info("%s: finished in %.0f s", one.job.name, spent)
                elif one.tries < 2:
                    log.warning("%s: failed (%s); trying once more", one.job.name, _why(one))
                    waiting.insert(0, (one.job, one.tries + 1))
                else:
                    made.failed[one.job.name] = _why(one)
                    log.error("%s: failed again (%s); its log is %s", one.job.name, _why(one), one.job.log)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                states = ", ".join(f"{r.job.name} {r.job.progress()}".strip() for r in running)
                log.info("running: %s; waiting: %d", states or "none", len(waiting))
    finally:  # also after Ctrl-C or an error: no process is left running
        _end(running)
    return made


def _first_ready(waiting: Sequence[tuple[Job, int]], running: Sequence[_Running]) -> int | None:
    """If what a job needs has failed, the job starts all the same, and its own error says what is missing."""
    open_ = {job.name for job, _ in waiting} | {one.job.name for one in running}
    return next((i for i, (job, _) in enumerate(waiting) if job.ready() and not open_ & set(job.needs)), None)


def _end(running: Sequence[_Running]) -> None:
    for one in running:
        one.process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.file.close()


def _start(job: Job, tries: int, sharers: int) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    file = job.log.open("ab")
    threads = max(1, (os.cpu_count() or 1) // sharers)
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    command = list(job.command())
    log.info("%s: started", job.name)
    # preexec_fn: if this process is killed, its children must not keep writing to the files of the next one.
    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, preexec_fn=_die_with_parent)
    return _Running(job, tries, process, file, time.monotonic())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _why(one: _Running) -> str:
    lines = [line for line in one.job.log.read_text(errors="replace").splitlines() if line.strip()]
    code = one.process.returncode
    last = lines[-1].strip() if lines else "no output"
    return last if code else f"exited with status 0 but without its results: {last}"
