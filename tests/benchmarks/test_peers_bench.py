"""MemOPD beside its peers: every arm scores the same tokens, and a wrong one shows."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import peer_arms, peers, shapes
from benchmarks.__main__ import app
from benchmarks.output import markdown
from benchmarks.tables import load, tables_of

ROUNDING = 1e-5  # float32 on two layers of width 64; wrong positions or a missing key are off by far more


@pytest.fixture(autouse=True)
def without_tests_on_the_path(monkeypatch):
    """TRL would take tests/vllm for vLLM."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).name != "tests"])


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shapes, "VOCABULARY", 200)
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.MODELS["tiny"] | {"vocab_size": 200})
    monkeypatch.setitem(shapes.SHAPES, "q2", shapes.Shape(calls=3, trajectories=2, q=20, x=12, a=6))
    monkeypatch.setattr(peers, "CHECKED_LAYERS", 2)


def test_arms_that_are_installed_are_measured_and_others_say_so(small, tmp_path):
    what = ("peers", "--model", "tiny", "--shapes", "q2", "--dtype", "float32", "--repeats", "1", "--json")
    done = CliRunner().invoke(app, list(what), catch_exceptions=False)
    assert done.exit_code == 0
    (tmp_path / "r.jsonl").write_text(done.stdout)
    [result] = load(tmp_path / "r.jsonl")
    arms = {a.name: a for a in result.arms}
    assert list(arms) == list(peer_arms.ARMS)
    for name, arm in arms.items():
        if why := peer_arms.missing(name):
            assert arm.note == why
            assert math.isnan(arm.seconds)
        else:
            assert arm.error < ROUNDING
            assert 0 < arm.build_seconds < 60
    assert arms["MemOPD"].rows < arms["split rows"].rows == arms["merged rows"].rows  # no call extends another
    assert result.baseline != "MemOPD"
    assert "torch>=2.9.1,<2.11" in json.loads(done.stdout)["not_run"]["AReaL 1.0.4"]
    assert "| MemOPD |" in markdown(tables_of([result])[0])


def test_an_arm_that_fails_is_named_and_the_others_are_measured(small, monkeypatch):
    """While it is built, with an error without text, and in a round, as when memory runs out."""
    calls = []

    def split(model, episodes):
        ready = peer_arms.split(model, episodes)

        def logprobs():
            calls.append(0)
            if len(calls) > 4:  # the check, two to warm up, and the round that is not counted
                raise RuntimeError("CUDA error\n and what else it says")
            return ready.logprobs()

        return replace(ready, logprobs=logprobs)

    def merged(model, episodes):
        raise AssertionError

    arms = {"split rows": split, "merged rows": merged, "another": peer_arms.split, "MemOPD": peer_arms.memopd}
    for module in (peers, peer_arms):
        monkeypatch.setattr(module, "ARMS", {name: (build, None) for name, build in arms.items()})
    models = [shapes.random_model("tiny", torch.float32, "cpu") for _ in range(2)]
    result = peers.run_peers(*models, "itself", shapes.episodes_of("q2"), "q2", 1, repeats=1)
    assert [a.note for a in result.arms] == ["CUDA error", "AssertionError", "", ""]
    assert [math.isnan(a.seconds) for a in result.arms] == [True, True, False, False]
    assert result.baseline == "another"


@pytest.mark.parametrize("name", [n for n, (_, module) in peer_arms.ARMS.items() if module])
def test_a_peer_agrees_with_split_rows_in_value_and_gradient(small, name):
    if why := peer_arms.missing(name):
        pytest.skip(why)
    model, episodes = shapes.random_model("tiny", torch.float32, "cpu"), shapes.episodes_of("q2")
    found = []
    for arm in ("split rows", name):
        ready = peer_arms.ARMS[arm][0](model, episodes)
        model.set_attn_implementation(ready.attention)
        logprob = ready.logprobs()
        model.zero_grad()
        logprob.mean().backward()
        found.append((logprob.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    assert torch.allclose(found[0][0], found[1][0], atol=ROUNDING)
    assert torch.allclose(found[0][1], found[1][1], atol=ROUNDING)


def test_an_arm_that_sees_other_positions_has_an_error(small, monkeypatch):
    """The check can fail: some rows three positions on."""
    model, episodes = shapes.random_model("tiny", torch.float32, "cpu"), shapes.episodes_of("q2")
    alone = peers._alone(model, episodes)
    assert peers._error(model, "MemOPD", episodes, alone)[0] < ROUNDING
    calls = peer_arms.compile_calls

    def moved(given):
        packed = calls(given)
        packed.positions.flags.writeable = True
        packed.positions[len(packed) // 2 :] += 3
        return packed

    monkeypatch.setattr(peer_arms, "compile_calls", moved)
    assert peers._error(model, "MemOPD", episodes, alone)[0] > 10 * ROUNDING
