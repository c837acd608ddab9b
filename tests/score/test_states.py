"""Hidden states at the decisions, packed and call by call."""

import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from calls import mem1_calls, mixed_calls
from work import module_walks

from memopd.attention import plan
from memopd.compile import compile_calls, fill
from memopd.models.load import backbone
from memopd.score import call_states, decision_states, many_passes, packed_logprobs
from memopd.types import Call
from memopd.verify.families import FAMILIES, tiny_model

UNSHARED = ["qwen3-next (linear attention)", "mamba2 (recurrent)", "bloom (own attention)"]


def alone(model, call: Call) -> torch.Tensor:
    """The states that predict the sampled tokens, from the model as it comes."""
    ids = torch.tensor([[*call.prompt.tolist(), *call.completion[:-1].tolist()]])
    return backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, len(call.prompt) - 1 :]


@pytest.mark.parametrize("family", ["llama", "gemma3 (mixed windows)", *UNSHARED])
@torch.no_grad()
def test_states_are_those_of_the_calls_in_order(family):
    """Unshared models too: there the result is the very same computation."""
    model, calls = tiny_model(family, dtype=torch.float64), mixed_calls(2)
    expected = torch.cat([alone(model, call) for call in calls if call.trainable])
    packed = compile_calls(calls)
    actual = decision_states(model, packed, "dense")
    assert actual.shape == (len(packed.decisions), expected.shape[1])
    if family in UNSHARED:
        assert torch.equal(actual, expected)
    else:
        assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


@torch.no_grad()
def test_packs_of_one_budget_hold_the_states_of_another():
    model, calls = tiny_model("qwen2", dtype=torch.float64), mixed_calls(5)
    whole = compile_calls(calls)
    by_call = decision_states(model, whole, "dense")
    packs = fill(calls, 60)
    assert len(packs) > 1
    for packed in packs:
        here = np.isin(whole.decisions.call, packed.decisions.call)
        difference = decision_states(model, packed, "dense") - by_call[torch.as_tensor(here)]
        assert difference.abs().max() <= 1e-12 * by_call.abs().max()


@torch.no_grad()
def test_call_states_start_where_they_are_told_to():
    model, (call, *_) = tiny_model("llama"), mem1_calls(0)
    path = np.concatenate([call.prompt, call.completion[:-1]])
    every = call_states(model, path, 0)
    assert len(every) == len(path)
    assert torch.equal(call_states(model, path, 9), every[9:])


def test_states_carry_gradients():
    model = tiny_model("llama")
    decision_states(model, compile_calls(mem1_calls(0)), "dense").sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lm_head" not in n)


@pytest.mark.parametrize("family", UNSHARED)
@torch.no_grad()
def test_running_unshared_is_said_once(family, caplog, monkeypatch):
    monkeypatch.setattr(plan, "_logged", set())
    packed = compile_calls(mem1_calls(0, calls=2))
    with caplog.at_level(logging.WARNING, "memopd"):
        for seed in range(2):
            model = tiny_model(family, seed)
            decision_states(model, packed, "dense")
            decision_states(model, packed, "dense")
    (record,) = [r for r in caplog.records if r.name == "memopd"]
    assert type(model).__name__ in record.message
    assert record.message.endswith("its calls run one by one, exact but unshared")


@torch.no_grad()
def test_shared_models_say_nothing(caplog, monkeypatch):
    monkeypatch.setattr(plan, "_logged", set())
    with caplog.at_level(logging.WARNING, "memopd"):
        decision_states(tiny_model("llama"), compile_calls(mem1_calls(0, calls=2)), "dense")
    assert not [r for r in caplog.records if r.name == "memopd"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_backbone_has_no_head(family):
    model = tiny_model(family)
    out = backbone(model)(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    assert out.last_hidden_state.shape == (1, 2, 64)


def test_ids_of_another_model_are_named_before_anything_runs():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="token id 500 is outside this model's vocabulary of 131"):
        decision_states(model, compile_calls([Call([5, 6], [7, 500])]), "dense")  # the last token has no row
    with pytest.raises(ValueError, match="token id 400"):
        call_states(model, np.array([1, 400]), 0)


def test_dropout_anywhere_is_refused_while_training():
    model = tiny_model("llama")
    model.extra = torch.nn.Dropout(0.1)
    packed = compile_calls(mem1_calls(0, calls=2))
    decision_states(model.eval(), packed, "dense")
    with pytest.raises(ValueError, match="dropout must be 0"):
        decision_states(model.train(), packed, "dense")


@pytest.mark.parametrize("family", ["llama", UNSHARED[0]])
def test_many_passes_go_through_the_modules_once(family, monkeypatch):
    """However many passes; and every pass gives what it gives alone, also after a block that an error ended."""
    model, packed = tiny_model(family).train(), compile_calls(mem1_calls(0, calls=2))
    expected, setting = decision_states(model, packed, "dense"), model.config._attn_implementation
    walks = module_walks(monkeypatch)
    for passes in (1, 4):
        with many_passes(model), many_passes(model) as share:
            found = [decision_states(model, packed, "dense") for _ in range(passes)]
        assert share.shared == (family == "llama")
        assert all(torch.equal(states, expected) for states in found)
        assert model.config._attn_implementation == setting
    assert walks[: len(walks) // 2] == walks[len(walks) // 2 :]
    with pytest.raises(KeyError), many_passes(model):
        raise KeyError
    model.extra = torch.nn.Dropout(0.1)
    for block in (many_passes(model), nullcontext()):
        with pytest.raises(ValueError, match="dropout must be 0"), block:
            decision_states(model, packed, "dense")


def test_dropout_is_named_before_the_head_is_blamed_for_it():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout must be 0 .* or model\.eval\(\)"):
        packed_logprobs(model.train(), mem1_calls(0, calls=2))


def test_a_temperature_must_be_above_0():
    with pytest.raises(ValueError, match="temperature must be above 0"):
        packed_logprobs(tiny_model("llama"), mem1_calls(0, calls=2), temperature=0)


@pytest.mark.parametrize("attention", ["dense", "cascade"])
def test_autocast(attention):
    """Rotary embeddings promote queries and keys; values stay: kernels want one type."""
    model = tiny_model("qwen2")
    packed = compile_calls(mem1_calls(0))
    exact = decision_states(model, packed, attention)
    with torch.autocast("cpu", torch.bfloat16):
        rough = decision_states(model, packed, attention)
    assert (rough - exact).norm() < 0.1 * exact.norm()
