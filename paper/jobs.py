"""Commands in processes of their own, several at once. One that fails is tried once more, and the others go on."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

log = logging.getLogger("memopd")

POLL = 0.2  # seconds between looks at the processes
TOLD = 60.0  # seconds between lines about how far they are


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    command: Callable[[], Sequence[str]]  # asked for at every start: it depends on what an earlier try left
    finished: Callable[[], bool]
    log: Path  # what the process says
    progress: Callable[[], str] = lambda: ""  # how far it is, in a word


@dataclass(slots=True)
class _Running:
    job: Job
    tries: int
    process: subprocess.Popen[bytes]
    file: IO[bytes]
    began: float


def run_jobs(jobs: Sequence[Job], concurrent: int) -> dict[str, str]:
    """Run what is not finished. Returns the failed: name -> the last line it said."""
    waiting = [(job, 1) for job in jobs if not job.finished()]
    if jobs:
        log.info("%d of %d parts are there, %d to make", len(jobs) - len(waiting), len(jobs), len(waiting))
    running: list[_Running] = []
    failed: dict[str, str] = {}
    told = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < concurrent:
                running.append(_start(*waiting.pop(0), min(concurrent, len(waiting) + len(running) + 1)))
            time.sleep(POLL)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                one.file.close()
                spent = time.monotonic() - one.began
                if one.process.returncode == 0 and one.job.finished():
                    log.info("%s: finished in %.0f s", one.job.name, spent)
                elif one.tries < 2:
                    log.warning("%s: failed (%s); once more", one.job.name, _why(one))
                    waiting.insert(0, (one.job, one.tries + 1))
                else:
                    failed[one.job.name] = _why(one)
                    log.error("%s: failed again (%s); its log is %s", one.job.name, _why(one), one.job.log)
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                far = ", ".join(f"{r.job.name} {r.job.progress()}".strip() for r in running)
                log.info("running: %s; waiting: %d", far or "none", len(waiting))
    finally:  # somebody at the keyboard, or an error of ours: nothing is left behind
        for one in running:
            one.process.kill()
            one.process.wait()
            one.file.close()
    return failed


def _start(job: Job, tries: int, sharers: int) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    file = job.log.open("ab")
    threads = max(1, (os.cpu_count() or 1) // sharers)
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    command = list(job.command())
    log.info("%s: started", job.name)
    # preexec_fn: should this process be killed outright, its children must not go on writing beside a new one.
    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, preexec_fn=_die_with_parent)
    return _Running(job, tries, process, file, time.monotonic())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _why(one: _Running) -> str:
    lines = [line for line in one.job.log.read_text(errors="replace").splitlines() if line.strip()]
    code = one.process.returncode
    said = lines[-1].strip() if lines else "said nothing"
    return said if code else f"ended well without its results: {said}"
