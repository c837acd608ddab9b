"""`make test-vllm` names an interpreter that has vLLM; without one nothing here runs.

A server takes half a minute to start, so one serves all tests that do not need one of their own.
"""

import os

import pytest
from real_vllm import make_model, serving, wait_until_up

collect_ignore = [] if os.environ.get("MEMOPD_VLLM_PYTHON") else ["test_real.py", "test_whole.py", "test_deaths.py"]


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """The policy before training: path, model, tokenizer."""
    path = tmp_path_factory.mktemp("vllm") / "first"
    return (path, *make_model(path, seed=0))


@pytest.fixture(scope="session")
def second(first, tmp_path_factory):
    """The same shape after training: path, model."""
    path = tmp_path_factory.mktemp("vllm") / "second"
    return path, make_model(path, seed=1)[0]


@pytest.fixture(scope="session")
def server(first):
    with serving(first[0]) as running:
        wait_until_up(running)
        yield running
