"""What a run keeps of an update is what the update used."""

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from pages import run_of, workshop
from train.tiny import THINK

from memopd.compile import compile_calls
from memopd.config import load_config
from memopd.record import read_episodes
from memopd.score import Target, score, teacher_target
from memopd.train.batch import compile_batches
from memopd.train.learner import build
from memopd.train.scoring import score_batches
from memopd.train.terms import make_terms
from memopd.train.traces import EPISODES, make_traces, read_traces, write_traces
from memopd.train.train import train
from memopd.train.update import update
from memopd.verify.audit import persistent_states


def decode(ids):
    return "".join("</think>" if i == THINK else "x" for i in ids)


@cache
def updated(**overrides: str):
    """One update of two mini-batches with a rate of zero: the policy that it began with is the one it ends with."""
    settings = {"optimise.lr": "0", "optimise.mini_batch": "3", "optimise.epochs": "2"} | overrides
    config = load_config(workshop() / "config.toml", settings)
    learner = build(config, torch.device("cpu"))
    episodes = list(read_episodes(workshop() / "episodes"))[:6]
    helper = replace(episodes[1].calls[1], trainable=False)
    episodes[1] = replace(episodes[1], calls=(episodes[1].calls[0], helper, *episodes[1].calls[2:]))
    batches = compile_batches(episodes, config.optimise, 0, 0)
    scored, guides = score_batches(learner, batches, decode)
    terms, _ = make_terms(batches, scored, learner.algorithm)
    update(learner, batches, terms, guides, step=0)
    return learner, episodes, batches, terms, make_traces(episodes, batches, terms, guides, learner.critic is not None)


@pytest.mark.parametrize("state", ["aligned", "persistent"])
def test_traces_are_what_independent_scoring_gives(state):
    learner, episodes, batches, terms, traces = updated(**{"teacher.state": state})
    expected = {}
    for batch, known in zip(batches, terms, strict=True):
        for e, episode in enumerate(batch.episodes):
            expected[episode.id] = known.advantage[torch.as_tensor(batch.episode == e)]
    assert [(t.episode, t.call) for t in traces] == [
        (e.id, t) for e in episodes[:EPISODES] for t, call in enumerate(e.calls) if call.trainable
    ]
    for episode in episodes[:EPISODES]:
        calls = [c for c in episode.calls if c.trainable]
        mine = [t for t in traces if t.episode == episode.id]
        assert np.concatenate([t.advantage for t in mine]).tolist() == expected[episode.id].tolist()
        packs = [compile_calls(calls)]
        target = teacher_target(learner.teacher.model, packs)
        if state == "persistent":
            target = Target(target.head, persistent_states(learner.teacher.model, episode))
        scores = score(learner.student.model, packs, teacher=target)
        for got, wanted in (("logp_old", scores.logprob), ("divergence", scores.divergence)):
            flat = np.concatenate([getattr(t, got) for t in mine])
            np.testing.assert_allclose(flat, wanted.detach().numpy(), rtol=1e-3, atol=1e-5)
        assert all(t.taught.all() and t.value is not None for t in mine)


def test_the_two_states_of_the_teacher_differ():
    aligned, persistent = (updated(**{"teacher.state": s})[4] for s in ("aligned", "persistent"))
    first = [np.abs(a.divergence - b.divergence).max() for a, b in zip(aligned, persistent, strict=True) if a.call == 0]
    last = [np.abs(a.divergence - b.divergence).max() for a, b in zip(aligned, persistent, strict=True) if a.call == 3]
    assert max(first) < 1e-4  # nothing has been dropped yet
    assert min(last) > 0.01


def test_without_critic_and_teacher_there_is_none():
    traces = updated(**{"teacher.state": "none", "optimise.algorithm": "grpo", "optimise.samples": "4"})[4]
    assert all(t.value is None and t.divergence is None and t.taught is None for t in traces)


def test_masks_are_kept():
    _, episodes, _, _, traces = updated(**{"teacher.mask": "action"})
    calls = {(e.id, t): call for e in episodes for t, call in enumerate(e.calls)}
    for trace in traces:
        at = np.flatnonzero(calls[trace.episode, trace.call].completion == THINK)
        thought = at[0] + 1 if len(at) else len(trace.taught)
        assert trace.taught.tolist() == [k >= thought for k in range(len(trace.taught))]
        assert trace.divergence.min() > 0  # also where nothing is taught: one can look at it
    assert 0 < np.concatenate([t.taught for t in traces]).mean() < 1


def test_written_and_read(tmp_path):
    traces = updated(**{"teacher.state": "aligned"})[4]
    write_traces(tmp_path / "step-000000.parquet", traces)
    back = read_traces(tmp_path / "step-000000.parquet")
    assert list(back) == [(t.episode, t.call) for t in traces]
    for trace in traces:
        for name in ("logp_old", "advantage", "value", "divergence", "taught"):
            assert np.array_equal(getattr(back[trace.episode, trace.call], name), getattr(trace, name))
    whole = (tmp_path / "step-000000.parquet").read_bytes()
    (tmp_path / "step-000000.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as traces"):
        read_traces(tmp_path / "step-000000.parquet")


def test_resume_cuts_traces_back_and_writes_the_same(tmp_path):
    whole, run = run_of(), tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.rmtree(run / "checkpoints" / "step-000002")
    (run / "checkpoints" / "latest").write_text("step-000001\n")
    (run / "traces" / "step-000007.parquet").write_bytes(b"of a life that was cut off")
    settings = {"teacher.state": "aligned", "optimise.tasks": "4", "optimise.mini_batch": "2"}
    train(load_config(workshop() / "config.toml", settings), run, resume=True)
    kept = [{f.name: f.read_bytes() for f in sorted((r / "traces").iterdir())} for r in (whole, run)]
    assert list(kept[0]) == [f"step-{n:06d}.parquet" for n in range(3)]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_two_ranks_keep_what_one_does(tmp_path):
    """Each rank knows the divergences of its own packs."""
    settings = ["--optimise.tasks", "4", "--optimise.mini_batch", "2", "--optimise.budget", "300"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    kept = []
    for ranks in ("1", "2"):
        command = [*launch, ranks, "-m", "memopd.cli", "train", str(workshop() / "config.toml"), *settings]
        done = subprocess.run([*command, "--output", str(tmp_path / ranks)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kept.append(read_traces(tmp_path / ranks / "traces" / "step-000000.parquet"))
    assert kept[0].keys() == kept[1].keys()
    for key, trace in kept[0].items():
        for name in ("logp_old", "advantage", "value", "divergence"):
            np.testing.assert_allclose(getattr(kept[1][key], name), getattr(trace, name), rtol=1e-3, atol=1e-5)
        assert trace.divergence.min() > 0
