"""For all tests: no network, one thread."""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test reaches for a network
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start: `make test` has a worker for every core

import pytest
import torch

from memopd import cli

torch.set_num_threads(1)  # tiny models: a second thread costs two to five times the CPU and saves nothing


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
