"""Adapters over one base in training: who computes with which, what is trained, what is kept, what is refused."""

import json
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import mem1_calls
from random_adapter import write_random
from safetensors.torch import load_file
from tiny import recorded, save_model, word_tokenizer, workshop
from work import module_walks

from memopd.config import load_config
from memopd.engine.protocol import Request
from memopd.files import write_digests
from memopd.models.adapters import adapter_weights, check_adapter, is_adapter_weight, load_adapter
from memopd.models.load import load_causal_lm, load_tokenizer
from memopd.score import packed_logprobs
from memopd.train import checkpoint
from memopd.train.batch import compile_batches
from memopd.train.engines import LocalPolicy
from memopd.train.learner import build, check_objective, export_policy
from memopd.train.metrics import read_metrics
from memopd.train.models import PolicyRoot, StatesRoot, copy_weights, prepare, whole_copy
from memopd.train.scoring import exact_states, policy_scores, score_batches, values
from memopd.train.sft import sft
from memopd.train.terms import make_terms
from memopd.train.train import train
from memopd.train.update import update
from memopd.types import Call, Sampling
from memopd.verify import equivalence
from memopd.verify.equivalence import gradient_equivalence

CPU = torch.device("cpu")
LORA = {"lora.rank": "4", "lora.alpha": "8"}


@cache
def shop() -> Path:
    """The workshop, and three random adapters: two of the student, one of the teacher."""
    for seed, (name, base) in enumerate((("start", "student"), ("guide", "student"), ("other", "teacher"))):
        write_random(workshop() / f"lora-{name}", workshop() / base, seed)
    return workshop()


def settings(start: bool = True, **more: str):
    adapter = {"model.adapter": str(shop() / "lora-start")} if start else {}
    named = {name.replace("__", "."): value for name, value in more.items()}
    return load_config(shop() / "config.toml", LORA | adapter | named)


def shared_teacher() -> dict[str, str]:
    return {"model__teacher": str(shop() / "student"), "model__teacher_adapter": str(shop() / "lora-guide")}


def batches_of(config):
    return compile_batches(recorded(episodes=8), config.optimise, 0, 0)


def one_update(learner):
    batches = batches_of(learner.config)
    scored, guides = score_batches(learner, batches, word_tokenizer().decode)
    terms, _ = make_terms(batches, scored, learner.algorithm)
    return update(learner, batches, terms, guides, 0)


def loaded(adapter: str, base: str = "student", dtype=torch.float32):
    """A model with one adapter, and nothing else of ours."""
    model = load_causal_lm(str(workshop() / base), dtype)
    if adapter:
        load_adapter(model, str(shop() / f"lora-{adapter}"))
    return model.eval()


def scored_by(model, batch):
    return policy_scores(prepare(PolicyRoot(model, "auto"), settings().model, CPU, trained=False), batch, 1.0)


# ---- one base ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_share_one_base_in_memory(dtype):
    learner = build(settings(**shared_teacher(), model__dtype=dtype), CPU)
    roots = (learner.student, learner.critic, learner.reference, learner.teacher)
    layers = [root.model.get_decoder().layers[0].self_attn.q_proj for root in roots]
    assert len({layer.base_layer.weight.data_ptr() for layer in layers}) == 1
    assert learner.head.weight.data_ptr() == learner.student.model.lm_head.weight.data_ptr()
    # Everything that the four hold: the base once, four adapters in float32, a value head.
    storages = {s.data_ptr(): s.nbytes() for r in roots for p in r.parameters() for s in [p.untyped_storage()]}
    base = sum(p.nbytes for p in load_causal_lm(str(workshop() / "student"), getattr(torch, dtype)).parameters())
    adapter = sum(w.nbytes for w in loaded("start").state_dict().values() if w.shape[0] == 4 or w.shape[-1] == 4)
    head = sum(p.nbytes for p in learner.critic.model.score.parameters())
    assert sum(storages.values()) == base + 4 * adapter + head
    assert {w.dtype for w in (learner.student.weights | learner.critic.weights).values()} == {torch.float32}


def test_each_root_computes_with_its_own_adapter():
    """Against models that were loaded one by one; in any order."""
    config = settings(**shared_teacher())
    learner, batch = build(config, CPU), batches_of(config)[0]
    alone = {name: scored_by(loaded(name), batch) for name in ("start", "guide", "")}
    teacher = exact_states(prepare(StatesRoot(loaded("guide"), "auto"), config.model, CPU, trained=False), batch)
    assert len({float(logp.sum()) for logp in alone.values()}) == 3
    for _ in range(2):
        assert torch.equal(policy_scores(learner.student, batch, 1.0), alone["start"])
        states = exact_states(learner.teacher, batch)
        assert all(torch.equal(states[at], teacher[at]) for at in teacher)
        assert torch.equal(policy_scores(learner.reference, batch, 1.0), alone["start"])
        assert not values(learner.critic, batch).any()  # its head starts at zero


def test_an_update_goes_through_the_modules_as_often_with_many_packs_as_with_few(monkeypatch):
    """A model with adapters has thousands of modules: a walk through them for every pass takes as long as the pass."""
    found, all_walks = {}, module_walks(monkeypatch)
    for budget in ("2048", "400"):
        learner = build(settings(**shared_teacher(), optimise__budget=budget), CPU)
        one_update(learner)  # which looks for the layers with adapters
        before = len(all_walks)
        one_update(learner)
        packs = sum(len(batch.work) for batch in batches_of(learner.config))
        found[packs] = len(all_walks) - before
    (few, walks), (many, same) = found.items()
    assert many > 2 * few
    assert walks == same


def test_without_a_start_the_reference_is_the_bare_base_and_the_student_starts_there():
    config = settings(start=False, model__teacher=str(shop() / "student"))
    learner, batch = build(config, CPU), batches_of(config)[0]
    bare = scored_by(loaded(""), batch)
    assert torch.equal(policy_scores(learner.reference, batch, 1.0), bare)
    assert torch.equal(policy_scores(learner.student, batch, 1.0), bare)
    assert {n.split(".")[-2] for n, _ in learner.student.named_parameters() if is_adapter_weight(n)} == {
        "student",
        "critic",
    }


def test_a_teacher_on_another_base_is_its_own_model_with_its_own_adapter():
    config = settings(model__teacher_adapter=str(shop() / "lora-other"))
    learner, batch = build(config, CPU), batches_of(config)[0]
    assert learner.teacher.base is None
    alone = prepare(StatesRoot(loaded("other", "teacher"), "auto"), config.model, CPU, trained=False)
    expected, states = exact_states(alone, batch), exact_states(learner.teacher, batch)
    assert all(torch.equal(states[at], expected[at]) for at in expected)
    # The same without LoRA in the student.
    full = load_config(shop() / "config.toml", {"model.teacher_adapter": str(shop() / "lora-other")})
    states = exact_states(build(full, CPU).teacher, batch)
    assert all(torch.equal(states[at], expected[at]) for at in expected)


def test_without_weight_no_teacher_is_loaded(monkeypatch):
    monkeypatch.setattr("memopd.train.roots.same_base", None)  # nobody even looks at the teacher
    config = settings(teacher__weight="0.0", model__teacher="/nowhere", model__teacher_adapter="/nowhere")
    learner = build(config, CPU)
    assert learner.teacher is None
    assert learner.head is None


# ---- what an update changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_update_changes_the_adapters_that_are_trained_and_nothing_else(algorithm):
    learner = build(settings(**shared_teacher(), optimise__algorithm=algorithm, model__checkpointing="true"), CPU)
    everything = dict(learner.student.model.named_parameters())
    before = {name: p.detach().clone() for name, p in everything.items()}
    batch = batches_of(learner.config)[0]
    reference = policy_scores(learner.reference, batch, 1.0)
    metrics = one_update(learner)
    one_update(learner)  # in the first one the critic's head is zero, so that its adapter has no gradient
    moved = {name.split(".")[-2] for name in everything if not torch.equal(everything[name], before[name])}
    assert moved == ({"student", "critic"} if algorithm == "ppo" else {"student"})
    assert metrics["first_ratio_error"] == 0
    assert torch.equal(policy_scores(learner.reference, batch, 1.0), reference)
    assert not torch.equal(policy_scores(learner.student, batch, 1.0), reference)
    if algorithm == "ppo":
        assert values(learner.critic, batch).any()
    else:
        assert learner.critic is None
    assert learner.tensors()["student"].keys() == adapter_weights(learner.student.model, "student").keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_is_independent(dtype):
    """As the run's own check sees it, and in the gradients of the adapter."""
    learner = build(settings(**shared_teacher(), model__dtype=dtype), CPU)
    learner.student.activate()
    model, calls = learner.student.model, mem1_calls(0)
    assert equivalence(model, calls).passed
    report = gradient_equivalence(model, calls)
    assert report.passed
    assert ".student." in report.worst_parameter


# ---- sampling ---------------------------------------------------------------------------------------------------


def sampled_gap(learner, policy, version: int) -> float:
    """max |log p of the sampler − log p of the trainer| of fresh samples."""
    policy.refresh(version)
    prompts = [call.prompt for call in mem1_calls(version, calls=3)]
    requests = [Request(p, sampling=Sampling(max_tokens=12), seed=i) for i, p in enumerate(prompts)]
    completions = policy.engine.generate(requests)
    learner.student.activate()
    calls = [Call(p, c.tokens) for p, c in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        ours = packed_logprobs(learner.student.model, calls)
    return max(float((torch.as_tensor(c.logprobs) - o).abs().max()) for c, o in zip(completions, ours, strict=True))


def test_the_engine_samples_from_the_very_model_with_the_students_adapter():
    learner = build(settings(**shared_teacher()), CPU)
    tokenizer = load_tokenizer(str(shop() / "student"))
    short = load_config(shop() / "config.toml", {"tasks.max_context": "200", "sampling.max_tokens": "20"})
    policy = LocalPolicy(short, learner.student, tokenizer, Path())
    assert policy.model is learner.student.model
    try:
        assert sampled_gap(learner, policy, 0) < 1e-4
        one_update(learner)  # the critic's adapter was active last
        assert sampled_gap(learner, policy, 1) < 1e-4
        state = {name: value.clone() for name, value in policy.model.state_dict().items()}
        policy.engine.update(state, 2)
        assert policy.engine.version == 2
    finally:
        policy.engine.close()


def test_the_engine_samples_from_a_leaner_copy_of_the_adapted_layers(monkeypatch):
    """As it does on a GPU. The copy follows the adapter and does not change it."""
    learner = build(settings(**shared_teacher()), CPU)
    limits = {"tasks.max_context": "200", "sampling.max_tokens": "20"}
    monkeypatch.setattr("memopd.train.engines.DEVICES", ("cpu",))
    policy = LocalPolicy(load_config(shop() / "config.toml", limits), learner.student, word_tokenizer(), Path())
    assert policy.model is not learner.student.model
    try:
        assert sampled_gap(learner, policy, 0) < 1e-4
        addresses = [p.data_ptr() for p in policy.model.parameters()]
        one_update(learner)
        stale = sampled_gap(learner, SimpleNamespace(refresh=lambda _: None, engine=policy.engine), 1)
        assert stale > 1e-3
        before = {name: p.clone() for name, p in learner.student.model.named_parameters()}
        assert sampled_gap(learner, policy, 2) < 1e-4
        assert [p.data_ptr() for p in policy.model.parameters()] == addresses
        assert all(torch.equal(p, before[name]) for name, p in learner.student.model.named_parameters())
    finally:
        policy.engine.close()


def test_a_whole_copy_has_the_adapter():
    """What several ranks sample from: the copy of the base is made once, the adapter's after every update."""
    learner = build(settings(**shared_teacher()), CPU)
    copy = whole_copy(learner.student, "float32")
    copy_weights(learner.student, copy)
    one_update(learner)
    copy_weights(learner.student, copy, frozen=False)
    calls = mem1_calls(0)
    learner.student.activate()
    with torch.no_grad():
        pairs = zip(packed_logprobs(copy, calls), packed_logprobs(learner.student.model, calls), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(p.requires_grad for p in copy.parameters())


# ---- whole runs -------------------------------------------------------------------------------------------------


def test_resumed_is_undisturbed(tmp_path):
    config = settings(**shared_teacher())
    train(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("step-000001")
    shutil.rmtree(tmp_path / "again" / "adapter")
    train(config, tmp_path / "again", resume=True)
    lines = [
        [{k: v for k, v in line.items() if "second" not in k} for line in read_metrics(tmp_path / run)]
        for run in ("run", "again")
    ]
    assert lines[0] == lines[1]
    files = sorted((tmp_path / "run").rglob("step-000003/*.safetensors"))
    files.append(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(files) == 5
    for file in files:
        a, b = load_file(file), load_file(tmp_path / "again" / file.relative_to(tmp_path / "run"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not (tmp_path / "run" / "model").exists()
    # The adapter is that of the last checkpoint, and fits the base.
    assert check_adapter(str(tmp_path / "run" / "adapter"), str(shop() / "student")).verified
    learner = build(config, CPU)
    checkpoint.restore(tmp_path / "run" / "checkpoints" / "step-000003", learner.tensors())
    ends = load_causal_lm(str(shop() / "student"), torch.float32)
    load_adapter(ends, str(tmp_path / "run" / "adapter"))
    batch = batches_of(config)[0]
    assert torch.equal(policy_scores(learner.student, batch, 1.0), scored_by(ends, batch))


def test_sft_starts_from_a_base_and_then_from_its_own_adapter(tmp_path):
    save_model(tmp_path / "base", 0, word_tokenizer(size=130))  # transformers adds a token to it
    stated = {
        "sft.start": str(tmp_path / "base"),
        "sft.episodes": str(shop() / "episodes"),
        "sft.keep": "",
        "sft.tokens": "16000",
        "sft.batch": "4000",
        "sft.lr": "1e-2",
        "model.teacher": "",
        "model.student": "",
    }
    config = load_config(shop() / "config.toml", LORA | stated)
    sft(config, tmp_path / "first")
    first = read_metrics(tmp_path / "first")
    assert first[-1]["loss"] < first[0]["loss"]
    assert check_adapter(str(tmp_path / "first" / "adapter"), str(tmp_path / "base")).rank == 4
    again = load_config(shop() / "config.toml", LORA | stated | {"model.adapter": str(tmp_path / "first" / "adapter")})
    sft(again, tmp_path / "second")
    assert read_metrics(tmp_path / "second")[0]["loss"] < first[0]["loss"]  # the same batch, a better start


def test_export_needs_no_second_copy_of_the_base(tmp_path):
    learner = build(settings(start=False), CPU)
    export_policy(tmp_path, learner.student, load_tokenizer(str(shop() / "student")), str(shop() / "student"))
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "adapter").iterdir()}
    weights = sum(w.nbytes for w in learner.student.weights.values())
    assert weights < sizes["adapter_model.safetensors"] < weights + 10_000


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_settings_that_do_not_agree_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"lora.dropout: must be 0, got 0.1: packed calls share rows"):
        settings(lora__dropout="0.1")
    with pytest.raises(ValueError, match=r"model.adapter: set lora.rank to train it"):
        check_objective(settings(lora__rank="0"))
    for name, value in (("alpha", "8"), ("targets", "q_proj")):
        without = load_config(shop() / "config.toml", {f"lora.{name}": value})
        with pytest.raises(ValueError, match=rf"lora\.{name}: set lora.rank to train adapters; with lora.rank = 0 all"):
            check_objective(without)
    check_objective(load_config(shop() / "config.toml", {"lora.alpha": "0"}))  # the default
    wrong = r"lora-start has lora.rank = 4, lora.alpha = 8 and lora.targets = down_proj,gate_proj,k_proj,o_proj,"
    for change in ({"lora__rank": "8"}, {"lora__alpha": "0", "lora__rank": "2"}, {"lora__targets": "q_proj,v_proj"}):
        with pytest.raises(ValueError, match=wrong):
            build(settings(**change), CPU)
    with pytest.raises(ValueError, match="was trained on other weights than those of"):
        build(settings(model__student=str(shop() / "teacher")), CPU)
    with pytest.raises(ValueError, match="was trained on other weights than those of"):
        build(settings(model__teacher_adapter=str(shop() / "lora-guide")), CPU)
    uneven = shutil.copytree(shop() / "lora-start", tmp_path / "uneven")
    held = json.loads((uneven / "adapter_config.json").read_text())
    (uneven / "adapter_config.json").write_text(json.dumps(held | {"use_rslora": True}))
    write_digests(uneven)
    with pytest.raises(ValueError, match=r"model.adapter: .*uneven has other ranks or scales than lora.rank"):
        build(settings(model__adapter=str(uneven)), CPU)
    there = {"sft.tokenizer": str(shop() / "student"), "sft.episodes": str(shop() / "episodes")}
    bare = {"sft.start": "shape.json", **there}
    with pytest.raises(ValueError, match=r"shape\.json: has no weights to keep frozen"):
        sft(load_config(shop() / "config.toml", LORA | bare), tmp_path / "run")


def test_alpha_is_twice_the_rank_unless_it_is_given():
    assert settings(start=False, lora__alpha="0").lora.scale == 8
    assert settings(start=False, lora__alpha="3").lora.scale == 3
