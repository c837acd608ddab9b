"""bfloat16 passes over float32 master weights, on one process; frozen models in the precision that they run in."""

import pytest
import torch
import torch.distributed as dist
import transformers
from command import memopd
from saved import read_whole
from tiny import recorded, word_tokenizer, workshop
from torch.distributed.tensor import DTensor

from memopd.config import ModelConfig, load_config
from memopd.train import checkpoint, models, ranks
from memopd.train.batch import compile_batches
from memopd.train.engines import LocalPolicy
from memopd.train.learner import build, export_model
from memopd.train.metrics import read_metrics
from memopd.train.models import PolicyRoot, copy_weights, is_sharded, on_device, prepare, whole_copy
from memopd.train.scoring import policy_scores, score_batches, values
from memopd.train.terms import make_terms
from memopd.train.update import update
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


BF16 = {"model.dtype": "bfloat16", "optimise.budget": "700"}


def step_of(learner, batches):
    scored, guides = score_batches(learner, batches, word_tokenizer().decode)
    terms, metrics = make_terms(batches, scored, learner.algorithm)
    return metrics | update(learner, batches, terms, guides, 0)


def whole(tensors) -> list[torch.Tensor]:
    return [w.full_tensor() if isinstance(w, DTensor) else w for group in tensors.values() for w in group.values()]


@pytest.fixture
def alone_in_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_masters_are_mixed_precision_as_fsdp_computes_it(monkeypatch, alone_in_a_group):
    """Gradients over several packs, two optimiser steps, student and critic: bit for bit."""
    config = load_config(
        workshop() / "config.toml", BF16 | {"optimise.mini_batch": "2", "optimise.max_grad_norm": "1e9"}
    )
    batches = compile_batches(recorded(episodes=4), config.optimise, 0, 0)
    ours = build(config, CPU)
    monkeypatch.setattr(ranks, "world", lambda: 2)  # so that FSDP shards the models, here over one process
    fsdp = build(config, CPU)
    monkeypatch.undo()
    assert is_sharded(fsdp.student)
    assert not is_sharded(ours.student)
    before = [w.clone() for w in whole(ours.tensors())]
    a, b = step_of(ours, batches), step_of(fsdp, batches)
    norms = {"grad_norm", "critic_grad_norm"}  # FSDP takes the root of a square of each tensor's norm
    assert {n: a[n] for n in a.keys() - norms} == {n: b[n] for n in b.keys() - norms}
    assert all(a[n] == pytest.approx(b[n], rel=1e-6) for n in norms)
    pairs = list(zip(whole(ours.tensors()), whole(fsdp.tensors()), before, strict=True))
    assert len(pairs) > 100
    assert all(torch.equal(x, y) for x, y, _ in pairs)
    assert not any(torch.equal(x, start) for x, _, start in pairs)


def test_what_is_kept_in_which_precision():
    config = load_config(workshop() / "config.toml", BF16)
    learner = build(config, CPU)
    assert {w.dtype for w in (learner.student.weights | learner.critic.weights).values()} == {torch.float32}
    assert {w.dtype for w in learner.student.parameters()} == {torch.bfloat16}
    assert {n for n, w in learner.critic.named_parameters() if w.dtype != torch.bfloat16} == {
        "model.score.weight",
        "model.score.bias",
    }
    assert learner.student.model.model.rotary_emb.inv_freq.dtype == torch.float32  # rounded, it would turn other angles
    for frozen in (learner.reference, learner.teacher):
        assert {w.dtype for w in frozen.weights.values()} == {torch.bfloat16}
        assert frozen.model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert not any(p.requires_grad for p in frozen.parameters())
    # The reference starts as the student: trained or frozen, both score alike.
    batch = compile_batches(recorded(episodes=8), config.optimise, 0, 0)[0]
    a, b = (policy_scores(root, batch, 1.0) for root in (learner.student, learner.reference))
    assert torch.equal(a, b)


def test_the_model_computes_with_the_rounded_masters():
    """After a step, after a checkpoint was read, and with the addresses that an engine's CUDA graphs have captured."""
    config = load_config(workshop() / "config.toml", BF16)
    learner = build(config, CPU)
    batches = compile_batches(recorded(episodes=4), config.optimise, 0, 0)
    start = {n: (p.data_ptr(), p.clone()) for n, p in learner.student.model.named_parameters()}
    step_of(learner, batches)
    moved = 0
    for name, p in learner.student.model.named_parameters():
        assert torch.equal(p, learner.student.weights[name].bfloat16())
        assert p.grad is None
        assert p.data_ptr() == start[name][0]
        moved += not torch.equal(p, start[name][1])
    assert moved > 20
    with learner.student.masters.in_model():
        assert all(torch.equal(p, learner.student.weights[n]) for n, p in learner.student.model.named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in learner.student.model.parameters())


def test_a_checkpoint_reaches_the_model(tmp_path):
    config = load_config(workshop() / "config.toml", BF16)
    trained, fresh = build(config, CPU), build(config, CPU)
    batches = compile_batches(recorded(episodes=4), config.optimise, 0, 0)
    step_of(trained, batches)
    checkpoint.save(tmp_path, 1, trained.tensors(), keep=1)
    fresh.restore(checkpoint.latest(tmp_path))
    assert torch.equal(policy_scores(fresh.student, batches[0], 1.0), policy_scores(trained.student, batches[0], 1.0))
    assert torch.equal(values(fresh.critic, batches[0]), values(trained.critic, batches[0]))


def test_the_engine_samples_from_the_very_weights(tmp_path):
    config = load_config(workshop() / "config.toml", BF16 | {"tasks.max_context": "200", "sampling.max_tokens": "8"})
    learner = build(config, CPU)
    policy = LocalPolicy(config, learner.student, word_tokenizer(), tmp_path)
    policy.engine.close()
    assert policy.model is learner.student.model
    # What is exported are the masters, and config.json says so.
    export_model(tmp_path, learner.student, word_tokenizer())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert saved.config.dtype == torch.float32
    assert all(torch.equal(p, learner.student.weights[name]) for name, p in saved.named_parameters())


def test_a_whole_copy_ends_where_the_model_ends():
    """Instruct models end at more tokens than their config says; the copy that samples must too, and is its own."""
    student = build(load_config(workshop() / "config.toml"), CPU).student
    student.model.generation_config.eos_token_id = [1, 2]
    copy = whole_copy(student, "bfloat16")
    copy_weights(student, copy)
    assert copy.generation_config.eos_token_id == [1, 2]
    assert copy.config is not student.model.config
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_cannot_be_sharded_is_refused_in_one_line(monkeypatch):
    unshared = PolicyRoot(tiny_model("qwen3-next (linear attention)"), "auto")
    flat = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    gpt2 = PolicyRoot(transformers.GPT2LMHeadModel(flat), "auto")
    prepare(gpt2, ModelConfig(dtype="bfloat16"), CPU, trained=True)  # on one rank nothing is sharded
    monkeypatch.setattr(ranks, "world", lambda: 2)
    with pytest.raises(ValueError, match="which works on one rank only"):
        prepare(unshared, ModelConfig(dtype="float32"), CPU, trained=True)
    with pytest.raises(ValueError, match=r"no list of layers to shard: train it on one rank"):
        prepare(PolicyRoot(transformers.GPT2LMHeadModel(flat), "auto"), ModelConfig(), CPU, trained=True)


def test_a_frozen_model_stays_on_the_device_while_there_is_room(monkeypatch):
    """Never after its first use: only an update shows what it needs. It comes back with the very same weights."""
    root = build(load_config(workshop() / "config.toml"), CPU).reference
    before = {n: (p, p.data_ptr(), p.clone()) for n, p in root.named_parameters()}
    moves, rooms = [], []

    def to_a_gpu(device):
        if not moves or moves[-1] == "back":
            moves.append("there")
            for p in root.parameters():
                p.data = p.data + 1  # elsewhere, as `Module.to` does it

    def lend(room: bool):
        monkeypatch.setattr(models, "has_room", lambda device, size: rooms.append(size) or room)
        with on_device(root, torch.device("cuda")):
            assert all(p.data_ptr() != before[n][1] for n, p in root.named_parameters())
        if all(p.data_ptr() == before[n][1] for n, p in root.named_parameters()):
            moves.append("back")
            assert all(p is before[n][0] for n, p in root.named_parameters())
            assert all(torch.equal(p, before[n][2]) for n, p in root.named_parameters())

    monkeypatch.setattr(root, "to", to_a_gpu)
    for room in (True, True, True, False, False, True):
        lend(room)
    assert moves == ["there", "back", "there", "back", "there", "back", "there"]
    assert set(rooms) == {sum(p.nbytes for p in root.parameters())}


def test_room_is_what_the_largest_need_so_far_left(monkeypatch):
    known = {"mem_get_info": (40, 100), "memory_reserved": 50, "max_memory_allocated": 60}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert models.has_room(torch.device("cuda"), 20)  # 40 + 50 − 60 = 30: twenty, and a margin of ten
    assert not models.has_room(torch.device("cuda"), 21)
