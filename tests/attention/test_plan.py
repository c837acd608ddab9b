"""How a plan reaches the layers, and every way in which it could fail to."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers
from calls import mem1_calls, mixed_calls

from memopd.attention import KERNELS, make_plan, plan, planned_attention
from memopd.attention.dense import DensePlan, visible
from memopd.compile import compile_calls
from memopd.score import decision_states, head_of, states, vocabulary_scores
from memopd.types import Call
from memopd.verify import gradient_equivalence
from memopd.verify.families import FAMILIES, tiny_model

SHARED = [f for f in FAMILIES if not f.startswith(("qwen3-next", "mamba2", "bloom"))]


def rows_of(packed) -> dict[str, torch.Tensor]:
    ids, positions = (torch.as_tensor(x).long()[None] for x in (packed.tokens, packed.positions))
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


@pytest.fixture
def memopd_llama():
    model = tiny_model("llama")
    model.set_attn_implementation(plan.NAME)
    return model


@pytest.fixture
def packed():
    return compile_calls(mem1_calls(0))


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHARED)
def test_no_plan(family, packed):
    model = tiny_model(family)
    model.set_attn_implementation(plan.NAME)
    with pytest.raises(ValueError, match="no plan came with the call"):
        model(**rows_of(packed))


def test_generation_without_a_plan_is_refused_too(memopd_llama):
    with pytest.raises(ValueError, match="no plan came with the call"):
        memopd_llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_mask(mask, memopd_llama, packed):
    T = len(packed)
    square = torch.ones(1, 1, T, T, dtype=torch.bool) if mask == "bool" else torch.zeros(1, 1, T, T)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        memopd_llama(**rows_of(packed), attention_mask=square, memopd_plan=make_plan(packed, "dense", memopd_llama))


def test_dropout(packed, monkeypatch):
    """The kernels' own refusal, for a model that keeps its dropout where nobody looks."""
    monkeypatch.setattr(states, "check_dropout", lambda model: None)
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config)
    decision_states(model.eval(), packed, "dense")  # off in evaluation
    with pytest.raises(ValueError, match="attention dropout must be 0"):
        decision_states(model.train(), packed, "dense")
    assert model.config._attn_implementation != plan.NAME  # put back on the way out


def test_an_unknown_kernel_names_the_known_ones(packed):
    with pytest.raises(ValueError, match=r"unknown attention 'dnse': choose from .*dense"):
        make_plan(packed, "dnse", tiny_model("llama"))


# ---- whose attention it is, before and after ----------------------------------------------------------------


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_previous_attention_comes_back(before):
    model = tiny_model("llama")
    model.set_attn_implementation(before)
    with planned_attention(model):
        assert model.config._attn_implementation == plan.NAME
        with planned_attention(model):
            assert model.config._attn_implementation == plan.NAME
        assert model.config._attn_implementation == plan.NAME
    assert model.config._attn_implementation == before


def test_it_comes_back_after_an_error():
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(KeyError), planned_attention(model):
        raise KeyError
    assert model.config._attn_implementation == before


def test_the_model_computes_as_usual_afterwards(packed):
    model, ids = tiny_model("qwen3"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits
        decision_states(model, packed, "dense")
        assert torch.equal(model(ids).logits, expected)


def test_gradient_checkpointing_keeps_ours_for_the_backward_pass(packed):
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    before = model.config._attn_implementation
    with torch.no_grad(), planned_attention(model):
        pass
    assert model.config._attn_implementation == before  # nothing to run again
    states = decision_states(model, packed, "dense")
    assert model.config._attn_implementation == plan.NAME
    states.sum().backward()
    with pytest.raises(ValueError, match="no plan came with the call"):
        model(**rows_of(packed))


def gradients(family: str, checkpointing: bool) -> dict[str, torch.Tensor]:
    model = tiny_model(family, dtype=torch.float64).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    packed, head = compile_calls(mixed_calls(1)), head_of(model)
    states = decision_states(model, packed, "dense")
    scores = vocabulary_scores(head, states, torch.as_tensor(packed.decisions.token).long())
    scores.logprob.mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", SHARED)
def test_gradient_checkpointing_changes_no_gradient(family):
    on, off = gradients(family, checkpointing=True), gradients(family, checkpointing=False)
    assert on.keys() == off.keys()
    scale = max(g.abs().max() for g in off.values())
    for name, gradient in off.items():
        assert (on[name] - gradient).abs().max() <= 1e-12 * scale, name


@pytest.mark.parametrize("family", ["llama", "gemma2 (soft cap, mixed windows)", "gpt-oss (sinks, mixed windows)"])
def test_checkpointed_gradients_are_those_of_the_calls_alone(family):
    model = tiny_model(family, dtype=torch.float64).train()
    model.gradient_checkpointing_enable()
    report = gradient_equivalence(model, mem1_calls(3), "dense")
    assert report.difference <= 1e-6
    assert report.passed


# ---- which kernel -------------------------------------------------------------------------------------------


def config_of(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 64, "num_attention_heads": 4, **more})


@pytest.mark.parametrize(
    ("config", "device", "dtype", "rows", "kernel"),
    [
        ({}, "cpu", torch.float32, 100, "dense"),
        ({}, "cpu", torch.float32, 5000, "cascade"),
        ({"attn_logit_softcapping": 50.0}, "cpu", torch.float32, 5000, "dense"),
        ({}, "mps", torch.float32, 5000, "dense"),
        ({"qk_head_dim": 24, "v_head_dim": 16}, "cuda", torch.bfloat16, 5000, "dense"),
        ({}, "cuda", torch.bfloat16, 100, "cascade"),
        ({}, "cuda", torch.float64, 100, "dense"),
        ({"attn_logit_softcapping": 50.0}, "cuda", torch.bfloat16, 100, "flex"),
        ({"head_dim": 20}, "cuda", torch.bfloat16, 100, "flex"),
        ({"head_dim": 512}, "cuda", torch.bfloat16, 100, "flex"),
        ({"sliding_window": 8}, "cuda", torch.float32, 100, "flex"),
        ({"sliding_window": 8, "use_sliding_window": False}, "cuda", torch.float32, 100, "cascade"),
        ({"layer_types": ["sliding_attention"]}, "cuda", torch.float32, 100, "flex"),
    ],
)
def test_auto_chooses_by_model_device_precision_and_rows(config, device, dtype, rows, kernel):
    chosen, why = plan.choose_attention(config_of(**config), device, dtype, rows)
    assert chosen == kernel
    assert chosen in KERNELS
    assert why


def test_auto_says_once_what_it_chose(packed, caplog, monkeypatch):
    monkeypatch.setattr(plan, "_said", set())
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO, "memopd"):
        assert isinstance(make_plan(packed, "auto", model), DensePlan)
        make_plan(packed, "auto", model)
    assert [r.message for r in caplog.records] == ["attention: dense (under 512 rows on a CPU)"]


# ---- the dense plan by hand ---------------------------------------------------------------------------------


def test_visibility_of_the_example():
    """Row 3 (id 9) sees rows 0, 1, 3: its own call and nothing else."""
    mask = visible(torch.tensor([4, 4, 3, 4]))
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_a_window_counts_positions_on_the_path_not_rows():
    packed = compile_calls([Call([7, 8], [1, 2]), Call([7, 8, 9], [3])])
    dense = DensePlan(packed, torch.device("cpu"))
    assert dense.within(2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert dense.within(None) is dense.mask
    assert dense.within(3) is dense.mask  # as long as the longest call
