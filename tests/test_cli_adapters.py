"""A LoRA adapter on the command line: sampled with, audited, served, merged; refused where it does not fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from peft import PeftModel
from random_adapter import write_random
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd import packed_logprobs
from memopd.models.load import load_causal_lm, load_tokenizer
from memopd.record import read_episodes
from memopd.retrieval import Passage, build_index, write_corpus

BASE = Path(__file__).parents[1] / "models" / "student"  # saved in bfloat16, with tied embeddings


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("adapter") / "adapter", BASE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    asked = [{"id": str(i), "question": f"where is town {i}?", "golden_answers": ["Tal"]} for i in range(3)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    write_corpus(folder / "corpus.jsonl", [Passage(str(i), f"Town {i}", "It lies on the river Tal.") for i in range(5)])
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder


@pytest.fixture
def playing(world):
    """The options of `rollout` and `evaluate`."""
    return ("--index", world / "index", "--max-tokens", 24, "--max-context", 700, "--model", BASE)


def with_peft(adapter, dtype=torch.float32):
    """The adapted model as PEFT itself loads it."""
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype)
    return PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False).to(dtype).eval()


def farthest(model, calls):
    """The largest difference between recorded log-probabilities and those of `model`."""
    with torch.no_grad():
        ours = packed_logprobs(model, calls)
    return max(np.abs(o.double().numpy() - c.logprobs).max() for o, c in zip(ours, calls, strict=True))


def logits(model):
    ids = torch.arange(5, 205)[None]
    with torch.no_grad():
        return model(ids).logits.double()


def test_rollouts_are_sampled_with_the_adapter_and_audited_with_it(call_main, adapter, world, playing, tmp_path):
    store = tmp_path / "store"
    code, _, said = call_main("rollout", world / "tasks.jsonl", "-o", store, *playing, "--adapter", adapter)
    assert code == 0, said
    calls = [c for e in read_episodes(store) for c in e.calls]
    adapted, bare = with_peft(adapter).base_model.model, load_causal_lm(str(BASE), torch.float32).eval()
    assert farthest(adapted, calls) < 1e-3 < 0.1 < farthest(bare, calls)

    code, said, _ = call_main("audit", store, "--model", BASE, "--adapter", adapter, "--json")
    report = json.loads(said)
    assert code == 0
    assert report["model"] == f"{BASE}+{adapter}"
    assert report["recorded"]["p99"] < 1e-3
    other = json.loads(call_main("audit", store, "--model", BASE, "--json")[1])
    assert other["model"] == str(BASE)
    assert other["recorded"]["p99"] > 0.1


def test_an_evaluation_names_the_adapter(call_main, adapter, world, playing):
    code, said, error = call_main("evaluate", world / "tasks.jsonl", *playing, "--adapter", adapter, "--json")
    assert code == 0, error
    assert [r["system"] for r in json.loads(said)["results"]] == [f"{BASE}+{adapter}"]


def test_the_gateway_samples_with_the_adapter(call_main, adapter, tmp_path, monkeypatch):
    """The real application and engine; only the socket is left out."""
    answers = []

    def ask(server, sockets):
        with TestClient(server.config.app, base_url="http://127.0.0.1") as client:
            answers.append(client.get("/episodes/e/v1/models").json()["data"][0]["id"])
            payload = {"model": answers[0], "prompt": "The town on the river", "max_tokens": 16}
            client.post("/episodes/e/v1/completions", json=payload).raise_for_status()
            client.post("/episodes/e/reward", json={"reward": 1.0}).raise_for_status()

    monkeypatch.setattr("uvicorn.Server.run", ask)
    store = ("--store", tmp_path / "store", "--max-length", 64, "--port", 0)
    code, _, error = call_main("gateway", "--model", BASE, "--adapter", adapter, *store)
    assert code == 0, error
    assert answers == ["student+adapter"]
    (episode,) = read_episodes(tmp_path / "store")
    assert farthest(with_peft(adapter).base_model.model, episode.calls) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_computes_what_the_adapter_does(call_main, adapter, tmp_path, dtype):
    """Bound: docs/architecture.md, verify. The merged model may be twice as far from more precise arithmetic as the
    adapter on its base is, when both compute in the precision of the merged weights."""
    output = tmp_path / "merged"
    chosen = () if dtype == "bfloat16" else ("--dtype", dtype)  # the base is saved in bfloat16
    code, said, error = call_main("merge", BASE, "--adapter", adapter, "-o", output, *chosen)
    assert (code, said) == (0, f"{output}\n"), error
    precise, kind = (torch.float64, torch.float32) if dtype == "float32" else (torch.float32, torch.bfloat16)
    exact = logits(with_peft(adapter, precise))
    own = (logits(with_peft(adapter, kind)) - exact).abs().max()
    merged = AutoModelForCausalLM.from_pretrained(output, dtype="auto").eval()
    assert merged.dtype == kind
    assert merged.lm_head.weight is merged.model.embed_tokens.weight  # still tied
    away = (logits(merged) - exact).abs().max()
    bare = (logits(AutoModelForCausalLM.from_pretrained(BASE, dtype=kind)) - exact).abs().max()
    print(f"\n{dtype}: merged {away:.1e}, unmerged {own:.1e}, without the adapter {bare:.1e} from {precise}")
    assert away <= 2 * own < bare
    text = "Where is Tal?"
    assert AutoTokenizer.from_pretrained(output).encode(text) == load_tokenizer(str(BASE)).encode(text)
    expected, made = (json.loads((f / "generation_config.json").read_text()) for f in (BASE, output))
    assert {**expected, "transformers_version": ""} == {**made, "transformers_version": ""}
    assert not list(output.glob("*adapter*"))


def test_what_is_wrong_is_said_in_one_line(call_main, adapter, world, playing, tmp_path):
    def line(*arguments):
        code, out, error = call_main(*arguments)
        assert (code, out) == (2, "")
        (only,) = error.splitlines()
        return only

    (tmp_path / "taken").mkdir()
    merge = ("merge", BASE, "--adapter", adapter, "-o")
    assert f"{tmp_path / 'taken'}: exists already" in line(*merge, tmp_path / "taken")
    other = BASE.parent / "teacher"
    assert str(adapter) in (wrong := line("merge", other, "--adapter", adapter, "-o", tmp_path / "m"))
    assert str(other) in wrong
    assert not (tmp_path / "m").exists()
    nothing = tmp_path / "nothing"
    rollout = ("rollout", world / "tasks.jsonl", "-o", tmp_path / "store", *playing)
    assert f"{nothing}: there is no adapter here" in line(*rollout, "--adapter", nothing)
    servers = ("--servers", "http://127.0.0.1:9")
    assert f"{nothing}: there is no adapter here" in line(*rollout, *servers, "--adapter", nothing)
    scripted = ("rollout", world / "tasks.jsonl", "-o", tmp_path / "s", "--policy", "oracle", "--tokenizer", BASE)
    assert "--adapter needs --model" in line(*scripted, "--adapter", adapter)
    changed = shutil.copytree(BASE, tmp_path / "changed")  # of the same shapes, with other weights
    model = AutoModelForCausalLM.from_pretrained(changed, dtype="auto")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(changed)
    assert "trained on other weights" in line("merge", changed, "--adapter", adapter, "-o", tmp_path / "m")
