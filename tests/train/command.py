"""`memopd` in processes of its own, forked from one that has imported it already: a run costs its work, not imports."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"  # before the server starts, which hands it on

SERVER = multiprocessing.get_context("forkserver")
OURS = ["memopd.cli", "memopd.train.train", "memopd.train.sft", "memopd.engine.local.engine"]
THEIRS = ["torch.utils.tensorboard", "transformers.models.qwen2.modeling_qwen2", "pydantic", "pyarrow.compute"]
SERVER.set_forkserver_preload([*OURS, *THEIRS])


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float  # of CPU

    def line(self) -> str:
        """The one line that an error is."""
        assert self.code == 2, self.err
        assert "Traceback" not in self.err, self.err
        return next(line for line in self.err.splitlines() if line.startswith("memopd: "))


class Command:
    def __init__(self, *arguments: object, environment: dict[str, str] | None = None, before: object = None) -> None:
        """`before` is a picklable function that the process calls first."""
        self.folder = TemporaryDirectory()
        arguments = tuple(map(str, arguments))
        self.process = SERVER.Process(target=_main, args=(arguments, environment or {}, before, self.folder.name))
        self.process.start()

    def end(self) -> Ended:
        self.process.join()
        out, err, seconds = (Path(self.folder.name, name).read_text() for name in ("out", "err", "seconds"))
        self.folder.cleanup()
        return Ended(self.process.exitcode, out, err, float(seconds))

    def kill_at(self, seconds: float) -> None:
        """SIGKILL once the process has had so many seconds of CPU: a busy machine does not move the instant."""
        while self.process.is_alive() and self._seconds() < seconds:
            time.sleep(0.002)
        self.process.kill()
        self.process.join()

    def _seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return float("inf")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memopd(*arguments: object, **options: object) -> Ended:
    return Command(*arguments, **options).end()


def on_ranks(ranks: int, *arguments: object, **options: object) -> list[Ended]:
    """What torchrun does, less its own start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    places = [place | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)] if ranks > 1 else [{}]
    return [c.end() for c in [Command(*arguments, environment=e, **options) for e in places]]


def _main(arguments: tuple[str, ...], environment: dict[str, str], before: object, folder: str) -> None:
    os.environ.update(environment)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    import torch

    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["memopd", *arguments]
    from memopd import cli

    try:
        cli.main()
    finally:
        Path(folder, "seconds").write_text(str(time.process_time()))
