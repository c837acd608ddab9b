"""Every command on a pretrained model, SmolLM2-135M, with real questions and passages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from command import memopd

from memopd.models.load import load_tokenizer
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics

SHARED = Path(__file__).parents[3] / "shared"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "memopd" / "models"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SHARED / "data").is_dir(), reason="needs the real questions and passages of ../shared/data"
    ),
]

CONFIG = """
[model]
student = "{folder}/sft/model"
teacher = "{model}"

[tasks]
train = "{folder}/tasks.parquet"
index = "{folder}/index"
reward = "f1"
max_context = 1024

[sampling]
max_tokens = 16
batch = 4

[optimise]
steps = 2
tasks = 1
samples = 2
mini_batch = 2
budget = 2048

[teacher]
weight = 0.1

[sft]
start = "{model}"
episodes = ["{folder}/episodes"]
keep = []
tokens = 1000
batch = 500
lr = 2e-5
short = 0.0
"""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The folder that MEMOPD_SMOLLM2 names, or one that ../shared/tools/weights makes once and keeps."""
    if given := os.environ.get("MEMOPD_SMOLLM2"):
        return Path(given)
    folder, tool = CACHE / "smollm2-135m", SHARED / "tools" / "weights"
    if not (folder / "model.safetensors").is_file():
        if not tool.is_file():
            pytest.skip("needs a folder with SmolLM2-135M-Instruct in MEMOPD_SMOLLM2")
        made = subprocess.run([tool, "smollm2-135m", folder], env=os.environ | {"PYTHON": sys.executable}, check=False)
        if made.returncode:
            pytest.skip("../shared/tools/weights could not make the model")
    return folder


def run(*arguments: object) -> str:
    ended = memopd(*arguments)
    assert ended.code == 0, ended.err
    return ended.out


def test_a_short_round_of_every_command(smollm2, tmp_path):
    data = SHARED / "data"
    run("index", "build", data / "corpus.jsonl.gz", "-o", tmp_path / "index")
    run("tasks", "build", data / "nq.jsonl.gz", "-k", 1, "-o", tmp_path / "tasks.parquet")
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path, model=smollm2))
    play = [tmp_path / "tasks.parquet", "--index", tmp_path / "index", "--limit", 2, "--max-tokens", 16]
    run("rollout", *play, "--model", smollm2, "-o", tmp_path / "episodes")
    episodes = list(read_episodes(tmp_path / "episodes"))
    assert len(episodes) == 2
    system = load_tokenizer(str(smollm2)).decode(episodes[0].calls[0].prompt)
    assert system.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")

    report = json.loads(run("audit", tmp_path / "episodes", "--model", smollm2, "--json"))
    assert report["passed"]
    assert report["recorded"]["p99"] < 1e-3  # what the engine recorded is what the model alone gives

    run("sft", tmp_path / "config.toml", "--output", tmp_path / "sft")
    first, last = (line["loss"] for line in read_metrics(tmp_path / "sft"))
    assert last < first
    run("train", tmp_path / "config.toml", "--output", tmp_path / "run")
    assert [line["first_ratio_error"] for line in read_metrics(tmp_path / "run")] == [0.0, 0.0]
    assert all(line["grad_norm"] > 0 for line in read_metrics(tmp_path / "run"))

    run("evaluate", *play, "--model", tmp_path / "run" / "model", "-o", tmp_path / "run" / "evaluation" / "after.json")
    run("report", tmp_path / "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@contextmanager
def gateway(model: Path, store: Path) -> Iterator[str]:
    """`memopd gateway` as a user starts it. Its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "memopd.cli", "gateway", "--model", model, "--store", store, "--port", str(port)]
    line += ["--max-length", "512", "--slots", "1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert f"http://127.0.0.1:{port}/episodes/NAME/v1" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert "Traceback" not in process.stderr.read()


def test_the_gateway_records_what_it_samples(smollm2, tmp_path):
    tokenizer = load_tokenizer(str(smollm2))
    asked = {
        "model": smollm2.name,
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
        "max_tokens": 24,
        "seed": 0,
        "stop": ["."],
        "return_token_ids": True,
    }
    retries = httpx.HTTPTransport(retries=5)  # the address is printed before the port is open
    with gateway(smollm2, tmp_path / "store") as url, httpx.Client(transport=retries, timeout=300) as client:
        answer = client.post(f"{url}/episodes/e/v1/chat/completions", json=asked).raise_for_status().json()
        client.post(f"{url}/episodes/e/reward", json={"reward": 1}).raise_for_status()
    (episode,) = read_episodes(tmp_path / "store")
    (call,) = episode.calls
    assert call.prompt.tolist() == answer["prompt_token_ids"]
    assert call.completion.tolist() == answer["choices"][0]["token_ids"]
    said = answer["choices"][0]["message"]["content"]
    assert said
    assert tokenizer.decode(call.completion, skip_special_tokens=True).startswith(said)
    assert tokenizer.decode(call.prompt).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName")
    report = json.loads(run("audit", tmp_path / "store", "--model", smollm2, "--json"))
    assert report["passed"]
    assert report["recorded"]["p99"] < 1e-3
