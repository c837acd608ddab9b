"""Supervised training: what is imitated, in which order, and that it is learnt."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import Command, memopd
from live import policy, world
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd.agent.codec import codec_of
from memopd.config import SftConfig
from memopd.record import read_episodes, write_episodes
from memopd.train.batch import mini_batch
from memopd.train.metrics import read_metrics
from memopd.train.models import PolicyRoot
from memopd.train.sft import Example, dev_loss, imitate, load_examples, plan, well_formed
from memopd.verify.families import tiny_model


def test_the_loss_goes_down_and_the_tags_are_learnt():
    lines = read_metrics(policy())
    assert len(lines) == 200_000 // 4096
    assert lines[0]["loss"] == pytest.approx(np.log(2048), rel=0.05)  # knows nothing
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[23]["dev_loss"] > lines[-1]["dev_loss"] > 0
    assert {"dev_em", "dev_f1"} <= lines[23].keys()
    assert all(m["rows_saved"] > 0.1 for m in lines)
    model = AutoModelForCausalLM.from_pretrained(policy() / "model")
    tokenizer = AutoTokenizer.from_pretrained(policy() / "model")
    episode = next(read_episodes(world() / "world/oracle/dev/mem1/q1.parquet"))
    prompt = torch.as_tensor(episode.calls[0].prompt.copy()).long()[None]
    said = tokenizer.decode(model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :])
    assert said.startswith("<think>")


def test_killed_and_resumed(tmp_path):
    arguments = ("sft", world() / "sft.toml", "--sft.tokens", "80_000", "--run.save_every", "4", "--output")
    whole = memopd(*arguments, tmp_path / "whole")
    assert whole.code == 0, whole.err
    instant = random.uniform(0.1, 1) * whole.seconds
    Command(*arguments, tmp_path / "run").kill_at(instant)
    reached = len(read_metrics(tmp_path / "run"))
    assert memopd(*arguments, tmp_path / "run", *["--resume"] * (tmp_path / "run").exists()).code == 0
    a, b = (read_metrics(tmp_path / name) for name in ("run", "whole"))
    for line in (*a, *b):
        for name in [n for n in line if "second" in n]:
            del line[name]
    assert a == b, f"killed after {instant:.2f} s, {reached} steps"
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole"))
    assert all(a[n].equal(b[n]) for n in b)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Four oracle episodes of two questions, in which one earned too little and one lacks a closing tag."""
    codec = codec_of(AutoTokenizer.from_pretrained(world() / "world/tokenizer"))
    episodes = list(read_episodes(world() / "world/oracle/train/mem1/q2.parquet"))[:4]
    episodes[1] = replace(episodes[1], reward=1.0)
    first, *rest = episodes[2].calls
    broken = codec.encode(codec.decode(first.completion).replace("</think>", ""))
    episodes[2] = replace(episodes[2], calls=[replace(first, completion=broken, logprobs=None), *rest])
    path = tmp_path_factory.mktemp("store") / "episodes"
    write_episodes(path, episodes)
    return str(path), [e.id for e in episodes], codec.decode


@pytest.mark.parametrize(
    ("keep", "left"),
    [((), [0, 1, 2, 3]), (("correct",), [0, 2, 3]), (("valid",), [0, 1, 3]), (("correct", "valid"), [0, 3])],
)
def test_the_papers_filter(keep, left, store):
    path, ids, decode = store
    examples = load_examples([path], keep, decode, 4096)
    assert [e.episode.id for e in examples] == [ids[i] for i in left]
    assert {e.k for e in examples} == {2}
    assert examples[0].tokens == sum(len(c.path) for c in examples[0].episode.calls)


def test_what_cannot_be_imitated(store, caplog):
    path, _, decode = store
    with pytest.raises(ValueError, match=r"sft\.keep: good: choose from correct, valid"):
        load_examples([path], ["good"], decode, 4096)
    with pytest.raises(ValueError, match="no episode is left"):
        load_examples([path], [], decode, 100)
    assert "left out: episode" in caplog.text
    assert len(load_examples([path], (), decode, 4096, limit=2)) == 2
    assert load_examples([], (), decode, 4096) == []


def test_well_formed():
    assert well_formed("<think>a</think>\n<search>b</search>")
    assert well_formed("<think>a</think>\n<answer>b; c</answer>")
    assert not well_formed("<think>a</think>")
    assert not well_formed("<think>a\n<search>b</search>")
    assert not well_formed("<think>a</think><search>b</search><answer>c</answer>")
    assert not well_formed("<think>a</think><search>b<search>c</search>")


def example(number: int, k: int) -> Example:
    return Example(number, k, tokens=10 * k)  # the episode itself is not looked at


def test_short_tasks_come_first():
    examples = [example(n, k) for n, k in enumerate([1, 2, 8, 16] * 25)]
    s = SftConfig(batch=200, short=0.6, short_k=2)
    steps = plan(examples, s, 100, seed=0)
    horizons = [{e.k for e in batch} for batch in steps]
    assert all(h <= {1, 2} for h in horizons[:60])
    assert set.union(*horizons[60:]) == {1, 2, 8, 16}
    assert len(steps) == 100
    assert all(0 < sum(e.tokens for e in batch) <= 200 for batch in steps)
    # Every example once a round, in another order each time.
    seen = [e.episode for batch in steps[:60] for e in batch]
    rounds = [seen[at : at + 50] for at in range(0, len(seen) - 49, 50)]
    assert len(rounds) > 10
    assert all(sorted(r) == sorted(rounds[0]) for r in rounds)
    assert rounds[0] != rounds[1]
    assert steps == plan(examples, s, 100, seed=0) != plan(examples, s, 100, seed=1)
    # One that is larger than a batch is a batch of its own; where nothing is short, all are taken.
    assert [len(batch) for batch in plan([example(0, 16)], SftConfig(batch=50), 3, 0)] == [1, 1, 1]
    assert {e.k for batch in plan(examples[2::4], s, 10, 0) for e in batch} == {8}


def test_imitation_is_the_mean_over_the_whole_batch():
    """One large pack and many small ones give one loss and one step."""
    from tiny import recorded

    losses, after = [], []
    for budget in (4096, 130):
        root = PolicyRoot(tiny_model("qwen2"), "auto")
        batch = mini_batch(recorded(episodes=8)[:4], budget)
        losses.append(imitate(root, torch.optim.SGD(root.parameters(), lr=0.1), batch, 1e9))
        after.append(dev_loss(root, [Example(e, 1, 1) for e in recorded(episodes=8)[:4]], 4096)["dev_loss"])
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-6)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-5)
    assert after[0] == pytest.approx(after[1], rel=1e-6)
    assert after[0] < losses[0]["loss"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sft.start", ""], "sft.start: name the model to start from"),
        (["--sft.episodes", ""], "sft.episodes: name the episode stores"),
        (["--sft.tokens", "100"], "sft.tokens: 100 are less than one update of"),
        (["--sft.tokenizer", ""], "shape.json: no tokenizer can be loaded from it"),
        (["--tasks.dev=", "--sft.dev="], "run.dev_every: name stores to measure the loss on in sft.dev or tasks"),
        (["--keep", "best"], "sft.keep: best: choose from correct, valid"),
        (["--sft.episodes", "/nowhere"], "/nowhere"),
    ],
)
def test_what_a_user_got_wrong(arguments, complaint, tmp_path):
    assert complaint in memopd("sft", world() / "sft.toml", "--output", tmp_path / "run", *arguments).line()
