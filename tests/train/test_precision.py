"""bfloat16 passes over float32 master weights, on one process; frozen models in the precision that they run in."""

import pytest
import torch
import transformers
from command import memopd
from saved import read_whole
from tiny import recorded, workshop

from memopd.config import ModelConfig, load_config
from memopd.train import ranks
from memopd.train.batch import compile_batches
from memopd.train.learner import build
from memopd.train.log import read_metrics
from memopd.train.models import PolicyRoot, copy_weights, is_sharded, on_device, prepare, whole_copy
from memopd.train.scoring import policy_scores
from memopd.verify.families import tiny_model

CPU = torch.device("cpu")


def test_a_run_in_bfloat16(tmp_path):
    small = ("--optimise.lr", "1e-5", "--optimise.steps", "2", "--optimise.tasks", "4")
    ended = memopd(
        "train", workshop() / "config.toml", "--output", tmp_path / "run", "--model.dtype", "bfloat16", *small
    )
    assert ended.code == 0, ended.err
    lines = read_metrics(tmp_path / "run")
    assert all(m["first_ratio_error"] == 0 for m in lines)
    weights = read_whole(tmp_path / "run" / "checkpoints" / "step-000002", "student")
    start = read_whole(tmp_path / "run" / "checkpoints" / "step-000001", "student")
    assert all(w.dtype == torch.float32 for w in weights.values())
    moved = torch.cat([((weights[n] - start[n]) / weights[n]).abs().flatten() for n in weights])
    assert 0 < moved.median() < 2**-12  # steps that bfloat16 weights would have lost
    full = memopd("train", workshop() / "config.toml", "--output", tmp_path / "full", *small)
    assert full.code == 0
    precise, *_ = read_metrics(tmp_path / "full")
    for name in ("loss_opd", "entropy", "reward", "teacher_kl_think", "loss_value"):
        assert abs(lines[0][name] - precise[name]) < 0.02 * abs(precise[name]), name


def test_what_is_kept_in_which_precision():
    config = load_config(workshop() / "config.toml", {"model.dtype": "bfloat16"})
    with ranks.joined():
        learner = build(config, CPU)
        assert is_sharded(learner.student)
        assert {w.dtype for w in learner.student.weights.values()} == {torch.float32}
        for frozen in (learner.reference, learner.teacher):
            assert not is_sharded(frozen)
            assert {w.dtype for w in frozen.weights.values()} == {torch.bfloat16}
            assert frozen.model.model.rotary_emb.inv_freq.dtype == torch.float32  # rounded, it would turn other angles
            assert not any(p.requires_grad for p in frozen.parameters())
        copy = whole_copy(learner.student, "bfloat16")
        copy_weights(learner.student, copy)
        assert copy.model.rotary_emb.inv_freq.dtype == torch.float32
        # The reference starts as the student: sharded or whole, both score alike.
        batch = compile_batches(recorded(episodes=8), config.optimise, 0, 0)[0]
        a, b = (policy_scores(root, batch, 1.0) for root in (learner.student, learner.reference))
        assert torch.equal(a, b)


def test_a_whole_copy_ends_where_the_model_ends(tmp_path):
    """Instruct models end at more tokens than their config says; the copy that samples must too, and is its own."""
    config = load_config(workshop() / "config.toml", {"model.dtype": "bfloat16"})
    with ranks.joined():
        student = build(config, CPU).student
        student.model.generation_config.eos_token_id = [1, 2]
        copy = whole_copy(student, "bfloat16")
        assert copy.generation_config.eos_token_id == [1, 2]
        assert copy.config is not student.model.config


def test_what_cannot_be_sharded_is_refused_in_one_line(monkeypatch):
    unshared = PolicyRoot(tiny_model("qwen3-next (linear attention)"), "auto")
    monkeypatch.setattr(ranks, "world", lambda: 2)
    with pytest.raises(ValueError, match="which works on one rank only"):
        prepare(unshared, ModelConfig(dtype="float32"), CPU, trained=True)
    monkeypatch.undo()
    flat = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    with pytest.raises(
        ValueError, match=r"no list of layers to shard: train it on one rank, with model\.dtype float32"
    ):
        prepare(
            PolicyRoot(transformers.GPT2LMHeadModel(flat), "auto"), ModelConfig(dtype="bfloat16"), CPU, trained=True
        )


def test_lending_brings_back_the_very_same_weights(monkeypatch):
    root = build(load_config(workshop() / "config.toml"), CPU).reference
    before = {n: (p, p.data_ptr(), p.clone()) for n, p in root.named_parameters()}

    def to_a_gpu(device):
        for p in root.parameters():
            p.data = p.data + 1  # elsewhere, as `Module.to` does it

    monkeypatch.setattr(root, "to", to_a_gpu)
    with on_device(root, torch.device("cuda")):
        assert all(p.data_ptr() != before[n][1] for n, p in root.named_parameters())
    for name, p in root.named_parameters():
        was, where, value = before[name]
        assert p is was
        assert p.data_ptr() == where
        assert torch.equal(p, value)
