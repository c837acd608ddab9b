"""The whole way with a real server: agents recorded through the gateway, and training that samples from it."""

import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest
import torch
from real_vllm import MEMOPD, PYTHON, free_port, make_model, scorer, serving, train, wait_until_up

from benchmarks.engine import run_engine, work_of
from memopd import compile_calls, verify
from memopd.engine.protocol import Completion
from memopd.engine.vllm import weights as weight_updates
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics

# ---- the gateway ----------------------------------------------------------------------------------------------------


@contextmanager
def gateway(server, store):
    port = free_port()
    line = [*MEMOPD, "gateway", "--server", server, "--store", store, "--port", str(port)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert f"http://127.0.0.1:{port}/episodes/NAME/v1" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert "Traceback" not in process.stderr.read()


def rewriting_agent(create, question):
    """Knows nothing but OpenAI's client. Keeps its last reply and throws the rest of its context away."""
    memory, heard = "nothing", []
    for turn in range(4):
        content = f"{question} Your memory: {memory} Found: river {turn}"
        answer = create(messages=[{"role": "user", "content": content}], max_tokens=24, stop=["</search>"],
                        extra_body={"return_token_ids": True})  # fmt: skip
        memory = answer.choices[0].message.content
        heard.append((answer.model_extra["prompt_token_ids"], answer.choices[0].model_extra["token_ids"]))
    return heard


def chatting_agent(create, question):
    """Appends, streams, and sends back what it heard."""
    messages = [{"role": "user", "content": question}]
    for turn in range(3):
        stream = create(messages=messages, max_tokens=16, stream=True)
        heard = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        more = {"role": "user", "content": f"river {turn}"}
        messages += [{"role": "assistant", "content": heard}, more]


def test_agents_of_the_official_client_are_recorded_through_the_gateway(engine, server, first, tmp_path):
    path, model, _ = first
    told = {}
    with gateway(server.url, tmp_path / "store") as url:
        for n in range(4):
            for agent in (rewriting_agent, chatting_agent):
                name = f"{agent.__name__}-{n}"
                client = openai.OpenAI(base_url=f"{url}/episodes/{name}/v1", api_key="none", max_retries=3)
                assert [m.id for m in client.models.list()] == [path.name]

                def create(client=client, **rest):
                    return client.chat.completions.create(model=path.name, **rest)

                told[name] = agent(create, f"where is town {n}?")
                assert httpx.post(f"{url}/episodes/{name}/reward", json={"reward": n / 4}).status_code == 200
        client = openai.OpenAI(base_url=f"{url}/episodes/long/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="maximum model length"):  # what the server refuses
            client.completions.create(model=path.name, prompt=[5] * 600)
    episodes = {e.id: e for e in read_episodes(tmp_path / "store")}
    assert episodes.keys() == told.keys()
    for n in range(4):
        calls = episodes[f"rewriting_agent-{n}"].calls
        assert [(c.prompt.tolist(), c.completion.tolist()) for c in calls] == told[f"rewriting_agent-{n}"]
        assert episodes[f"rewriting_agent-{n}"].reward == n / 4
    calls = [c for e in episodes.values() for c in e.calls]
    assert all(c.trainable and c.policy_version == 1 for c in calls)  # as `engine` labelled them
    said = [Completion(c.completion, c.logprobs, c.stop) for c in calls]
    assert weight_updates.gap(scorer(model)([(c.prompt, c.completion) for c in calls], 1.0), said) < 1e-3
    packed = compile_calls(calls)
    assert len(packed.tokens) < sum(len(c.path) for c in calls)
    assert verify.equivalence(model, calls, attention="dense").passed
    whole = [e for name, e in episodes.items() if name.startswith("chatting")]
    assert any(
        after.prompt[: len(before.path) + 1].tolist() == [*before.path, before.completion[-1]]
        for e in whole
        for before, after in pairwise(e.calls)
    )  # an agent that appends reads the ids that were sampled


# ---- training -------------------------------------------------------------------------------------------------------


def test_training_samples_from_a_server_that_gets_every_update(server, first, searchable, tmp_path):
    """Two steps: the weights of each are on the server, and verified, before anything is sampled with them."""
    ended = train(searchable, first[0], server.url, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 2
    assert all(m["sampler_gap"] < 1e-3 and m["grad_norm"] > 0 for m in steps)
    for step in range(2):
        episodes = list(read_episodes(tmp_path / "run" / "episodes" / f"step-{step:06d}.parquet"))
        assert {c.policy_version for e in episodes for c in e.calls} == {step}
    label = httpx.get(f"{server.url}/weight_info").json()["weight_version"]
    assert label == f"1@{tmp_path.resolve()}/run/served/weights-1"
    for version in range(2):
        assert f"{server.url}: version {version}, log-probabilities within" in ended.stderr
    print("\n" + "\n".join(line for line in ended.stderr.splitlines() if "log-probabilities within" in line))


def test_a_stale_server_stops_training_by_name(server, first, searchable, tmp_path):
    """A server that says that it took the weights of the second step, and did not."""
    loads = []

    def swallow(path, body):
        if path == "/collective_rpc":
            loads.append(body)
        return len(loads) > 1 and path == "/collective_rpc"

    with relaying(server.url, swallow) as url:
        ended = train(searchable, first[0], url, tmp_path / "run")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert f"memopd: {url}: stale weights: its log-probabilities are" in ended.stderr
    assert "those of version 1" in ended.stderr
    assert len(read_metrics(tmp_path / "run")) == 1  # nothing was sampled with the old weights


@contextmanager
def relaying(target, swallow):
    """An address that passes everything on to `target`, but for what `swallow` says yes to: that succeeds at once."""

    class Relay(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(httpx.get(target + self.path, timeout=60))

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if swallow(self.path, body):
                return self.answer(httpx.Response(200, json={}))
            headers = {"Content-Type": "application/json"}
            return self.answer(httpx.post(target + self.path, content=body, headers=headers, timeout=60))

        def answer(self, response):
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *args):
            pass

    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{relay.server_port}"
    relay.shutdown()
    relay.server_close()


@pytest.mark.slow  # a server of its own
def test_training_a_tied_model_on_a_cpu_is_stopped(searchable, tmp_path):
    """vLLM 0.32 on CPU keeps the old output head of a tied model; the first update that matters shows it."""
    make_model(tmp_path / "tied", seed=0, tied=True)
    with serving(tmp_path / "tied") as tied:
        wait_until_up(tied)
        ended = train(searchable, tmp_path / "tied", tied.url, tmp_path / "run")
    assert ended.returncode == 2
    assert f"memopd: {tied.url}: stale weights:" in ended.stderr
    assert "cannot reload tied embeddings" in ended.stderr
    print(ended.stderr.splitlines()[-1])


@pytest.mark.slow  # a server of its own
def test_the_benchmark_measures_a_server_too():
    work = work_of(prompts=4, shortest=5, longest=40, most=12)
    result = run_engine("3m", torch.float32, "cpu", repeats=1, vllm=Path(PYTHON), work=work)
    (served,) = (a for a in result.arms if a.name.startswith("vLLM"))
    assert not served.note
    assert served.tokens_per_second > 0
