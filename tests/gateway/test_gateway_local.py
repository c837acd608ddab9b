"""The real engine behind the gateway: agents written against the official client alone give episodes that train."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise

import httpx
import numpy as np
import pytest
import torch
from gateway_parts import MODEL, client, serving, tokenizer, user
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from memopd import compile_calls, verify
from memopd.cli.gateway import gateway
from memopd.cli.options import Precision
from memopd.engine.local import LocalEngine
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics
from memopd.types import Sampling, StopReason

TRAIN = """
[model]
student = "{folder}/policy"

[sampling]
temperature = 0.8

[optimise]
steps = 1
tasks = {episodes}
mini_batch = {episodes}
lr = 1e-3
warmup = 0.0

[teacher]
state = "none"
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=336, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=tokenizer().eos_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def test_an_answer_in_json_is_sampled_under_its_schema_and_not_trained_on(model, tmp_path):
    """Beside a call without a schema, which keeps its own distribution."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    with serving(LocalEngine(model, tokenizer(), max_length=512), tmp_path) as url:
        create = client(url, "e").chat.completions.with_raw_response.create
        raw = create(model=MODEL, messages=[user("how many?")], response_format=form, max_tokens=64, seed=1)
        assert json.loads(raw.parse().choices[0].message.content)["n"] in (1, 22)
        assert raw.headers["x-memopd-trainable"] == "false"
        raw = create(model=MODEL, messages=[user("how many?")], max_tokens=8, logprobs=True, top_logprobs=2, seed=1)
        assert [len(entry.top_logprobs) for entry in raw.parse().choices[0].logprobs.content] == [2] * 8
        assert httpx.post(f"{url}/episodes/e/reward", json={"reward": 1}).status_code == 200
    (episode,) = read_episodes(tmp_path)
    assert [call.trainable for call in episode.calls] == [False, True]


def rewriting_agent(agent, question: str, turns: int = 4) -> None:
    """Uses only OpenAI's client. It keeps its last reply as memory and drops the rest of its context."""
    memory = "nothing yet"
    for turn in range(turns):
        answer = agent.chat.completions.create(
            model=MODEL,
            messages=[user(f"{question}\nYour memory: {memory}\nFound: river number {turn}")],
            max_tokens=24, temperature=0.8, stop=["</search>"],
        )  # fmt: skip
        memory = answer.choices[0].message.content


def chatting_agent(agent, question: str, seed: int, turns: int = 4) -> None:
    """Appends, streams, and sends the replies back."""
    messages = [user(question)]
    for turn in range(turns):
        stream = agent.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=24, temperature=0.8, stream=True, seed=seed + turn
        )
        reply = "".join(chunk.choices[0].delta.content for chunk in stream)
        messages += [{"role": "assistant", "content": reply}, user(f"river number {turn}")]


def test_agents_of_the_official_client_give_episodes_that_compile_and_are_equivalent(tmp_path, model):
    engine = LocalEngine(model, tokenizer(), slots=8)
    with serving(engine, tmp_path) as url:
        for n in range(3):
            rewriting_agent(client(url, f"rewriting-{n}"), f"where is town {n}?")
            chatting_agent(client(url, f"chatting-{n}"), f"where is town {n}?", seed=10 * n)
        raw = client(url, "raw").completions
        prompt = tokenizer()("the old town")["input_ids"]
        for _ in range(3):  # ids in, ids out
            answer = raw.create(
                model=MODEL, prompt=prompt, max_tokens=9, temperature=0.8, extra_body={"return_token_ids": True}
            )
            prompt = prompt + answer.choices[0].model_extra["token_ids"]
        for name in [f"{kind}-{n}" for kind in ("rewriting", "chatting") for n in range(3)] + ["raw"]:
            assert httpx.post(f"{url}/episodes/{name}/reward", json={"reward": 1.0}).status_code == 200
    engine.close()
    episodes = {episode.id: episode for episode in read_episodes(tmp_path)}
    assert len(episodes) == 7
    calls = [call for episode in episodes.values() for call in episode.calls]
    assert all(call.trainable for call in calls)
    assert {episode.sampling.temperature for episode in episodes.values()} == {0.8}

    packed = compile_calls(calls)
    assert len(packed.tokens) < sum(len(call.path) for call in calls)
    report = verify.equivalence(model, calls, attention="dense")
    assert report.passed, report

    # The recorded log-probabilities are those of the model, call by call.
    for call in calls:
        with torch.no_grad():
            logits = model(torch.as_tensor(call.path)[None].long()).logits[0, len(call.prompt) - 1 :]
        expected = (logits.double() / 0.8).log_softmax(-1)[torch.arange(len(call.completion)), call.completion.tolist()]
        np.testing.assert_allclose(call.logprobs, expected.numpy(), atol=1e-5)

    # An agent that only appends reads its own sampled ids again, whatever their text encodes to.
    spliced = 0
    for n in range(3):
        turns = episodes[f"chatting-{n}"].calls
        for before, after in pairwise(turns):
            path = [*before.prompt, *before.completion]
            spliced += after.prompt[: len(path)].tolist() == path
    assert spliced >= 6  # of 9: a random model's half characters and special tokens cannot come back as text
    ids = episodes["raw"].calls
    assert ids[2].prompt.tolist() == [*ids[1].prompt, *ids[1].completion]
    train_a_step(tmp_path, model, len(episodes))


def train_a_step(folder, model, episodes: int) -> None:
    """`memopd train --replay` on what the gateway recorded: its own check of equivalence, then one update."""
    model.save_pretrained(folder / "policy")
    tokenizer().save_pretrained(folder / "policy")
    config, run = folder / "train.toml", folder / "run"
    config.write_text(TRAIN.format(folder=folder, episodes=episodes))
    line = [sys.executable, "-m", "memopd.cli", "train", config, "--output", run, "--replay", folder]
    ended = subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (step,) = read_metrics(run)
    assert (step["left_out"], step["first_ratio_error"]) == (0, 0)
    assert step["sampler_gap"] < 1e-5  # what the gateway recorded is what the trainer computes
    assert step["grad_norm"] > 0
    before, after = (load_file(path / "model.safetensors") for path in (folder / "policy", run / "model"))
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_greedy_answers_are_alike_and_recorded_as_greedy(tmp_path, model):
    engine = LocalEngine(model, tokenizer(), slots=8)
    with serving(engine, tmp_path) as url:
        create = client(url, "e1").completions.create
        said = [
            create(model=MODEL, prompt="the river", temperature=t, seed=n, max_tokens=12).choices[0].text
            for t, n in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 1), (1, 2)]
        ]
        assert (len(set(said[:3])), len(set(said[3:]))) == (1, 2)
        assert httpx.post(f"{url}/episodes/e1/reward", json={"reward": 0}).status_code == 200
    engine.close()
    (episode,) = read_episodes(tmp_path)
    assert episode.sampling == Sampling(max_tokens=12)
    assert [call.trainable for call in episode.calls] == [False] * 3 + [True] * 3
    assert all((call.logprobs == 0).all() for call in episode.calls[:3])  # the distribution is certain


def test_what_the_engine_refuses_and_a_hang_up(tmp_path, model):
    engine = LocalEngine(model, tokenizer(), slots=8)
    with serving(engine, tmp_path) as url:
        raw = httpx.post(f"{url}/episodes/e1/v1/completions", json={"model": MODEL, "prompt": [1, 2, 5000]})
        assert (raw.status_code, raw.json()["error"]["code"]) == (400, "refused_by_engine")
        raw = httpx.post(f"{url}/episodes/e1/v1/completions", json={"model": MODEL, "prompt": [1] * 1024})
        assert (raw.status_code, raw.json()["error"]["code"]) == (400, "refused_by_engine")
        stream = client(url, "e1").completions.create(
            model=MODEL, prompt="the river", max_tokens=900, stream=True, stop=["never said"]
        )
        for _ in range(3):
            next(stream)
        stream.close()
        end = time.monotonic() + 60
        while httpx.get(f"{url}/health").json()["running"]:
            assert time.monotonic() < end
        summary = httpx.get(f"{url}/episodes/e1").json()
        assert (summary["calls"], summary["aborted"]) == (1, 1)
        assert client(url, "e1").completions.create(model=MODEL, prompt="on").usage.completion_tokens > 0
        assert httpx.post(f"{url}/episodes/e1/reward", json={"reward": 0}).status_code == 200
    engine.close()
    (episode,) = read_episodes(tmp_path)
    aborted, whole = episode.calls
    assert (aborted.stop, aborted.trainable, whole.trainable) == (StopReason.ABORTED, False, True)


def test_the_command_serves_is_killed_and_serves_again(tmp_path, model):
    model.save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    line = [
        sys.executable, "-c", "import typer; from memopd.cli.gateway import gateway; typer.run(gateway)",
        "--model", tmp_path / "policy", "--store", tmp_path / "store", "--port", str(port),
    ]  # fmt: skip
    for turn in range(2):
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert f"'policy' at http://127.0.0.1:{port}/episodes/NAME/v1" in server.stdout.readline()
                agent = client(f"http://127.0.0.1:{port}", "e1", max_retries=5)
                assert [m.id for m in agent.models.list()] == ["policy"]
                answer = agent.chat.completions.create(model="policy", messages=[user("town?")], max_tokens=5)
                assert answer.usage.completion_tokens > 0
                state = httpx.get(f"http://127.0.0.1:{port}/episodes/e1").json()
                assert state["calls"] == turn + 1
            finally:
                server.send_signal(signal.SIGKILL)
                assert "Traceback" not in server.stderr.read()


def test_the_command_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMOPD_GATEWAY_TOKEN", raising=False)
    with pytest.raises(ValueError, match="give --model PATH, or --server URL"):
        gateway(tmp_path)
    with pytest.raises(ValueError, match="set MEMOPD_GATEWAY_TOKEN"):
        gateway(tmp_path, model="m", host="0.0.0.0")
    with pytest.raises(ValueError, match="there is no model here"):
        gateway(tmp_path, model="/nowhere/at/all")
    with pytest.raises(ValueError, match="cannot find out which model it serves"):
        gateway(tmp_path, server="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("option", "given"),
    [("--max-length", {"max_length": 512}), ("--slots", {"slots": 64}), ("--dtype", {"dtype": Precision.float32})],
)
def test_the_command_refuses_options_that_a_server_has_of_its_own(tmp_path, option, given):
    """Also with their default values."""
    with pytest.raises(ValueError, match=f"^{option} is not for use with --server"):
        gateway(tmp_path, server="http://127.0.0.1:1", **given)


def test_a_port_in_use_is_said_before_anything_else(tmp_path, capsys):
    """It neither says that it serves nor touches the store, which the gateway that has the port may record to."""
    from memopd.cli.gateway import serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port} of 127.0.0.1 is in use: choose another with --port$"):
            serve(None, tmp_path / "store", "policy", None, "127.0.0.1", port)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "store").exists()
