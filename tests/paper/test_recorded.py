"""state, rules, corruption and domain through the command line: a random model, the oracle's real trajectories."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
from random_adapter import write_random
from small import folder
from transformers import AutoTokenizer

from memopd import cli
from memopd.agent import Agent, repeat
from memopd.agent.parts import build_parts
from memopd.config import TasksConfig
from memopd.engine.protocol import Request
from memopd.files import digest
from memopd.tasks.files import read_tasks
from memopd.types import Call, Episode, Sampling
from memopd.world.oracle import Oracle
from paper.__main__ import app
from paper.trajectories import Replay, Subject, check_same_actions

CONFIG = """
title = "Small"
model = "{folder}/model"
teacher = "{folder}/model"
tasks = ["{folder}/world/tasks/test-q2.parquet"]
index = "{folder}/world/index"
trajectories = 3
max_tokens = 16
max_context = 900
{extra}
"""


def oracle(self, rule, tasks):
    """Who can do the task makes several calls; a random model gives up at once."""
    tokenizer = AutoTokenizer.from_pretrained(folder() / "world" / "tokenizer")
    pairs = list(repeat(read_tasks(tasks)[: self.settings.trajectories]))
    environment, memory = build_parts(TasksConfig(index=self.settings.index, memory=rule), tokenizer)
    agent = Agent(Oracle(pairs, tokenizer, 0), environment, memory, tokenizer, Sampling(max_tokens=256), rule=rule)
    yield from agent.play(pairs)


@pytest.fixture
def run(tmp_path, monkeypatch):
    def experiment(name, extra="", scripted=True, options=()):
        if scripted:
            monkeypatch.setattr(Subject, "_sample", oracle)
        (tmp_path / "config.toml").write_text(CONFIG.format(folder=folder(), extra=extra))
        folders = ["--config", tmp_path / "config.toml", "--work", tmp_path / "work", "--output", tmp_path / "out"]
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            monkeypatch.setattr(sys, "argv", ["paper", name, *map(str, folders), *options])
            with pytest.raises(SystemExit) as left:
                cli.run(app)
        assert not left.value.code, said.getvalue()
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
        text = (tmp_path / "out" / f"{name}.md").read_text()
        return json.loads((tmp_path / "out" / f"{name}.json").read_text()), text

    return experiment


def test_state(run, tmp_path):
    found, text = run("state")
    rows = {r["representation"]: r for r in found["representations"]}
    assert rows["persistent history"]["p99_logprob"] > 1e-2
    assert rows["reconstructed packing"]["p99_logprob"] < 1e-4
    for who in ("student", "teacher"):
        by_call = {r["calls"]: r["mean_kl"] for r in found[who]}
        assert max(by_call["call 0"], by_call["call 1"]) < 1e-9 < 1e-6 < by_call["call 2 and later"]
        assert by_call["call 1 and later"] < by_call["call 2 and later"]
    assert [a["arm"] for a in found["arms"]] == ["persistent history", "fork", "realign", "mem1-official"]
    own, packed = found["bfloat16"]["rounding"][0], found["bfloat16"]["rounding"][-1]
    assert own["p99_logprob"] > 100 * found["rounding"][0]["p99_logprob"]
    assert packed["p99_logprob"] < 4 * own["p99_logprob"]
    assert found["trajectories"] == 3
    assert found["calls"] > 6
    assert "| persistent history |" in text
    run("domain")  # the same trajectories serve
    assert len(list((tmp_path / "work" / "trajectories").iterdir())) == 1


def test_trajectories_of_an_adapter_are_its_own(run, tmp_path):
    """Sampled for real: a base and two adapters of it give three sets of trajectories. Packing is exact for all."""
    for seed in (0, 1):
        write_random(tmp_path / f"adapter-{seed}", folder() / "model", seed)
    adapters = ["", *(f'adapter = "{tmp_path}/adapter-{seed}"' for seed in (0, 1))]
    for n, extra in enumerate(adapters, 1):
        found, _ = run("rules", f'rules = ["mem1"]\n{extra}', scripted=False)
        assert all(found["rules"]["mem1"][dtype]["passed"] for dtype in ("float32", "bfloat16"))
        assert ("adapter" in found["inputs"]) == bool(extra)
        stores = list((tmp_path / "work" / "trajectories").iterdir())
        assert len(stores) == n


def test_corruption(run):
    found, _ = run("corruption")
    exact, *wrong = found["rows"]
    assert [r["representation"] for r in wrong] == ["visibility only", "positions only", "both"]
    assert all(r["p99_logprob"] > 100 * exact["p99_logprob"] for r in wrong)


def test_domain(run):
    found, text = run("domain")
    again, reworded = run("domain", "differs = 'Another world.'", options=["--collect"])  # the words alone
    assert again == found | {"differs": "Another world."}
    assert reworded == f"{text}\n## Why ours differ\n\nAnother world.\n"
    assert run("domain", options=["--collect"])[1] == text
    assert found["inputs"].keys() == {"model", "teacher", "tasks", "index"}
    assert found["inputs"]["tasks"][0]["sha256"] == digest(folder() / "world" / "tasks" / "test-q2.parquet")
    assert found["sampled"] == found["sampled_tokens"]
    assert found["response_spurious"] > found["trajectory_spurious"] > 0
    assert f"{found['response_spurious']:,}" in text


def test_rules(run, tmp_path):
    """The actions of one set of trajectories under every rule: as many tokens everywhere, in other contexts."""
    rules = ["mem1", "summary", "full_response", "refresh"]
    found, text = run("rules", f"rules = {json.dumps(rules)}")
    assert list(found["rules"]) == rules
    assert len(list((tmp_path / "work" / "trajectories").iterdir())) == 1
    for dtype in ("float32", "bfloat16"):
        reports = [r[dtype] for r in found["rules"].values()]
        assert all(r["passed"] for r in reports)
        assert len({r["decisions"] for r in reports}) == 1
        assert len({r["tokens"] for r in reports}) == len(rules)
    assert all(r["float32"]["top1_agreement"] == 1 for r in found["rules"].values())
    assert "bfloat16, own rounding against float32:" in text


def test_actions_that_are_not_those_recorded_are_refused():
    recorded = [Episode("e", "t", [Call([1], [2]), Call([1, 2], [3])])]
    check_same_actions(recorded, [Episode("e", "t", [Call([7], [2]), Call([8], [3])], memory="window")])
    for wrong in ([Call([1], [2])], [Call([1], [2]), Call([1, 2], [4])]):
        with pytest.raises(ValueError, match="episode 'e': the actions under 'window' are not those recorded"):
            check_same_actions(recorded, [Episode("e", "t", wrong, memory="window")])


def test_a_rule_that_asks_the_model_cannot_be_replayed():
    asked = Request(np.array([1], np.int32), 0, episode="e", purpose="note")
    with pytest.raises(ValueError, match="asks the model for 'note', which nobody recorded"):
        Replay([Episode("e", "t", [Call([1], [2])])]).generate([asked])


def test_the_models_own_trajectories(run, tmp_path):
    """Sampled for real, and not a second time."""
    run("domain", scripted=False)
    store = next((tmp_path / "work" / "trajectories").iterdir())
    when = (store / "episodes.parquet").stat().st_mtime_ns
    run("domain", scripted=False)
    assert (store / "episodes.parquet").stat().st_mtime_ns == when
    run("domain", "seed = 1", scripted=False)  # other settings, other trajectories
    assert len(list((tmp_path / "work" / "trajectories").iterdir())) == 2


@pytest.mark.slow
def test_packing_trains_an_adapter_alone(run, tmp_path):
    write_random(tmp_path / "adapter", folder() / "model", 0)
    found, text = run("packing", f'adapter = "{tmp_path}/adapter"\nrepeats = 1')
    assert [r["shape"] for r in found["results"]] == ["recorded test-q2"]
    assert f"model+{tmp_path}/adapter" in text


@pytest.mark.slow
def test_packing(run):
    found, text = run("packing", 'shapes = ["q2"]\nmultiples = [1]\nrepeats = 1')
    assert [r["shape"] for r in found["results"]] == ["recorded test-q2", "q2"]
    assert "| q2 × 1 | 16 | 1,275 |" in text
