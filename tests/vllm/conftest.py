"""`make test-vllm` names an interpreter that has vLLM; without one nothing here runs.

A server takes half a minute to start, so one serves all tests that do not need one of their own.
"""

import json
import os

import pytest
from real_vllm import make_model, prompts_of, scorer, serving, wait_until_up

from memopd.engine.vllm import VllmEngine
from memopd.retrieval import Passage, build_index, write_corpus

NEED_VLLM = ["test_real.py", "test_real_lora.py", "test_whole.py", "test_deaths.py", "test_real_ahead.py"]
collect_ignore = [] if os.environ.get("MEMOPD_VLLM_PYTHON") else NEED_VLLM


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


@pytest.fixture
def engine(server, first):
    """Whatever a test before did to the server, it holds the first weights again."""
    path, model, tokenizer = first
    engine = VllmEngine([server.url], tokenizer, weights=path, version=1)
    engine.verify(scorer(model), prompts_of(tokenizer, 4), tolerance=1e-3)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def searchable(tmp_path_factory):
    """Tasks, and an index for who would search."""
    folder = tmp_path_factory.mktemp("whole")
    asked = [{"id": str(i), "question": f"where is town {i}?", "golden_answers": ["Tal"]} for i in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    write_corpus(folder / "corpus.jsonl", [Passage(str(i), f"Town {i}", "It lies on the river Tal.") for i in range(5)])
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder
