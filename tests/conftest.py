"""For all tests: no network, one thread, and the longest files first."""

import atexit
import os
import sys
from shutil import rmtree
from tempfile import mkdtemp

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test reaches for a network
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start: `make test` has a worker for every core

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # these commands would compile all of the library's files again

if "MEMOPD_TESTS" not in os.environ:  # a folder for what all workers use; they inherit its name
    os.environ["MEMOPD_TESTS"] = mkdtemp(prefix="memopd-")
    atexit.register(rmtree, os.environ["MEMOPD_TESTS"], ignore_errors=True)

import pytest
import torch
from hypothesis import settings

from memopd import cli

sys.dont_write_bytecode = False  # nor does the next run rewrite all tests
torch.set_num_threads(1)  # tiny models: a second thread costs two to five times the CPU and saves nothing

# A commit passes or fails, and neither by chance nor because the machine is busy.
settings.register_profile("same examples", derandomize=True, deadline=None)
settings.load_profile("same examples")

# Workers take whole files in this order. If a long one came last, the other workers would wait for it.
LONGEST = (
    "train/test_invariants.py", "examples/test_examples.py", "world/", "train/", "examples/", "gateway/", "paper/",
    "verify/", "engine/", "models/",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    def place(item):
        return next((i for i, part in enumerate(LONGEST) if f"tests/{part}" in item.path.as_posix()), len(LONGEST))

    items.sort(key=place)


@pytest.fixture
def call_main(monkeypatch, capfd):
    """The command in this process: (exit status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memopd", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = capfd.readouterr()
        return stopped.value.code or 0, shown.out, shown.err

    return call
