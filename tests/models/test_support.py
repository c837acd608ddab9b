"""Which models share rows, and what is refused."""

import pytest
import torch
import transformers
from calls import mem1_calls

from memopd.attention.cascade import CascadePlan
from memopd.compile import compile_calls
from memopd.models.attention import Layer
from memopd.models.support import Sharing, check_length, length_limit, reference_attention, rope_switch, sharing
from memopd.score import decision_states
from memopd.types import Call
from memopd.verify import equivalence
from memopd.verify.families import FAMILIES, tiny_model

UNSHARED = {
    "qwen3-next (linear attention)": "Qwen3NextForCausalLM has layers that carry state through time",
    "mamba2 (recurrent)": "Mamba2ForCausalLM has layers that carry state through time",
    "bloom (own attention)": "BloomForCausalLM does not use transformers' attention interface",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_who_shares(family):
    expected = Sharing(False, UNSHARED[family]) if family in UNSHARED else Sharing(True, "")
    assert sharing(tiny_model(family)) == expected


def test_an_unknown_type_of_layer_is_not_shared():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert sharing(model) == Sharing(False, "Qwen3ForCausalLM has layers of type chunked_attention")


def test_a_model_whose_attention_is_not_found_is_not_shared():
    """The checks of its source code have nothing to read, and must not pass for that."""
    model = tiny_model("mistral (sliding window)")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Mixer", (type(layer.self_attn),), {})
    assert sharing(model) == Sharing(False, "MistralForCausalLM has no attention layers that memopd recognises")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_keeps_soft_caps_and_sinks(family):
    expected = "eager" if family.startswith(("gemma2", "gpt-oss", "mamba2", "bloom")) else "sdpa"
    assert reference_attention(tiny_model(family)) == expected


# ---- rope types that change with the longest call -----------------------------------------------------------


def dynamic_llama(limit: int):
    config = FAMILIES["llama"]()
    config.max_position_embeddings = limit
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tiny_model("llama").state_dict())
    return model.double().eval()


def call_of(tokens: int) -> Call:
    """A call with a path of so many tokens."""
    return Call([3 + i % 100 for i in range(tokens - 3)], [7, 8, 9, 10])


MODELS = {
    "longrope": (lambda: tiny_model("phi3 (longrope)", dtype=torch.float64), 128),
    "dynamic": (lambda: dynamic_llama(96), 96),
}


@pytest.mark.parametrize("rope", MODELS)
def test_up_to_the_switch_all_is_exact(rope):
    make, limit = MODELS[rope]
    report = equivalence(make(), [*mem1_calls(0), call_of(limit)], "dense")
    assert report.passed
    assert report.shared
    assert report.max_logit_error <= 1e-12 * report.logit_scale


@pytest.mark.parametrize("rope", MODELS)
def test_past_the_switch_is_refused(rope):
    make, limit = MODELS[rope]
    model, calls = make(), [*mem1_calls(0), call_of(limit + 1)]
    message = f"call of {limit + 1} tokens passes the length of {limit} at which this model's {rope} rope changes"
    with pytest.raises(ValueError, match=message):
        equivalence(model, calls, "dense")
    with pytest.raises(ValueError, match=message):
        decision_states(model, compile_calls(calls), "dense")
    with pytest.raises(ValueError, match=message):
        check_length(model, limit + 1)
    check_length(model, limit)


@pytest.mark.parametrize("rope", MODELS)
def test_the_refusal_is_needed(rope):
    """Past the switch a short call's logits depend on the long call beside it."""
    make, limit = MODELS[rope]
    model, ids = make(), torch.arange(3, 33)[None]
    far = torch.arange(2 * limit)[None] % 100 + 3
    batch = torch.cat([torch.nn.functional.pad(ids, (0, far.shape[1] - ids.shape[1])), far])
    with torch.no_grad():
        alone = model(ids, use_cache=False).logits
        beside = model(batch, use_cache=False).logits[:1, : ids.shape[1]]
    assert (alone - beside).abs().max() > 1e-3


@pytest.mark.parametrize("family", [f for f in FAMILIES if "longrope" not in f])
def test_other_ropes_have_no_switch(family):
    check_length(tiny_model(family), 10**6)


def test_rope_parameters_of_each_layer_type_are_read():
    model = tiny_model("gemma3 (mixed windows)")
    ropes = model.config.rope_parameters
    assert all(isinstance(value, dict) for value in ropes.values())
    ropes["full_attention"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    with pytest.raises(ValueError, match=r"passes the length of 512 .* dynamic rope"):
        check_length(model, 513)


def test_a_window_that_lives_in_the_mask_alone_is_not_shared():
    """Qwen2-MoE's layers never tell the attention of their window: sharing would lose it without a word."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=131, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=12, max_window_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    verdict = sharing(model)
    assert (verdict.shared, "sliding window only through the mask" in verdict.reason) == (False, True)
    report = equivalence(model, mem1_calls(0), "dense")
    assert report.passed
    assert not report.shared


def test_values_of_another_width_are_refused_by_cascade_with_the_alternative():
    packed = compile_calls(mem1_calls(0))
    q, v = torch.randn(1, 4, len(packed), 24), torch.randn(1, 4, len(packed), 16)
    with pytest.raises(ValueError, match="values as wide as keys: use attention='dense'"):
        CascadePlan(packed, torch.device("cpu")).attend(q, q, v, Layer(1.0))


@pytest.mark.parametrize("rope", MODELS)
def test_the_engine_stops_where_packs_are_refused(rope):
    make, limit = MODELS[rope]
    model = make()
    assert rope_switch(model) == (rope, limit)
    assert length_limit(model, None) == limit
    assert length_limit(model, limit) == limit
    with pytest.raises(ValueError, match=f"max_length must be 2 to {limit}"):
        length_limit(model, limit + 1)


def test_a_length_without_a_switch_is_the_models_own():
    model = tiny_model("llama")
    assert rope_switch(model) is None
    assert length_limit(model, None) == 512
    assert length_limit(model, 300) == 300
    with pytest.raises(ValueError, match="max_length must be 2 to 512"):
        length_limit(model, 1)
