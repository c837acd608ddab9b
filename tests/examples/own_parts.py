"""Training with a part of a user's own, named by a setting: in this process, or as a user types it."""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch
from train.command import Ended, memopd
from train.saved import read_whole
from train.tiny import workshop

from memopd.train.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(output: Path, setting: str, name: str, *more: object) -> Ended:
    """Two updates, from the folder of the examples, where `module:name` is looked for too."""
    command = ("train", workshop() / "config.toml", "--output", output, setting, name, "--optimise.steps", "2", *more)
    return memopd(*command, before=partial(os.chdir, EXAMPLES))


@cache
def trained(setting: str, name: str, *more: object) -> Path:
    output = workshop() / "runs" / "-".join(["own", setting, name, *map(str, more)]).replace(":", "-")
    ended = train(output, setting, name, *more)
    assert ended.code == 0, ended.err
    return output


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return read_whole(run / "checkpoints" / f"step-00000{step}", "student")


def check_the_command_of_the_docstring(folder: Path, setting: str, name: str) -> None:
    """In a process of its own with the examples in PYTHONPATH: it ends with the weights of `trained`."""
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    command = ["train", workshop() / "config.toml", "--output", folder / "run", setting, name]
    done = subprocess.run(
        [sys.executable, "-m", "memopd.cli", *map(str, command), "--optimise.steps", "2"],
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in read_metrics(folder / "run")] == [0, 1]
    a, b = weights(folder / "run", 2), weights(trained(setting, name), 2)
    assert all(torch.equal(a[n], b[n]) for n in a)
