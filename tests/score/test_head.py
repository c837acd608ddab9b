"""The vocabulary head by itself, against the model's own logits."""

import copy

import pytest
import torch
import transformers
from calls import mem1_calls

from memopd.compile import compile_calls
from memopd.models.attention import NAME
from memopd.models.load import backbone
from memopd.score import decision_states, head_of
from memopd.score.head import Head
from memopd.verify.families import FAMILIES, VOCABULARY, tiny_model

IDS = torch.tensor([[5, 66, 7, 120, 33, 6, 6, 91]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_parity_with_the_models_own_logits(family, dtype):
    model = tiny_model(family, dtype=dtype)
    expected = model(input_ids=IDS, use_cache=False).logits
    head = head_of(model)
    actual = head.logits(backbone(model)(input_ids=IDS, use_cache=False).last_hidden_state)
    assert actual.shape == expected.shape == (1, 8, VOCABULARY)
    # The same product and the same steps after it: what differs is at most the order of a multiplication.
    eps = max(torch.finfo(dtype).eps, torch.finfo(expected.dtype).eps)  # Mamba 2 returns float32
    assert (actual.double() - expected.double()).abs().max() <= 4 * eps * expected.abs().max()


@torch.no_grad()
def test_what_follows_the_product():
    """logits · scale, then cap · tanh(logits / cap), by hand."""
    states, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0], [0.0, -1.0]])
    assert Head(weight, None).logits(states).tolist() == [[5.0, -2.0]]
    assert Head(weight, torch.tensor([1.0, 2.0])).logits(states).tolist() == [[6.0, 0.0]]
    assert Head(weight, None, scale=0.5).logits(states).tolist() == [[2.5, -1.0]]
    capped = Head(weight, None, softcap=2.0).logits(states)
    assert capped[0].tolist() == pytest.approx([2 * 0.98661430, -2 * 0.76159416])  # tanh 2.5, tanh -1
    both = Head(weight, None, scale=2.0, softcap=2.0).logits(states)
    assert both[0].tolist() == pytest.approx([2 * 0.99990920, -2 * 0.96402758])  # tanh 5, tanh -2


def test_tied_weights_are_the_embedding_itself():
    model = tiny_model("qwen2")
    assert head_of(model).weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["granite (scaled logits)", "gemma2 (soft cap, mixed windows)"])
def test_scales_and_caps_are_read(family):
    head = head_of(tiny_model(family))
    assert (head.scale, head.softcap) == ((1 / 8, None) if "granite" in family else (1.0, 30.0))


@pytest.mark.parametrize(
    "after",
    [lambda logits: logits * 1.1, lambda logits: logits + 1.0, lambda logits: logits.tanh()],
    ids=["scaled", "shifted", "squashed"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_model_that_does_more_to_its_logits_is_refused(after, dtype):
    model = tiny_model("llama", dtype=dtype)
    forward = model.forward

    def altered(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = after(out.logits)
        return out

    model.forward = altered
    message = r"LlamaForCausalLM does more to its logits than memopd\.score\.head supports \(off by "
    for _ in range(2):  # not remembered as good
        with pytest.raises(ValueError, match=message):
            head_of(model)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no vocabulary head"):
        head_of(transformers.AutoModel.from_config(FAMILIES["llama"]()))


def test_each_model_is_checked_once():
    model, runs = tiny_model("llama"), []
    model.register_forward_hook(lambda *_: runs.append(1))
    head_of(model)
    head_of(model)
    assert len(runs) == 1
    other = copy.deepcopy(model)
    head_of(other)
    assert len(runs) == 2


def test_the_check_does_not_depend_on_the_attention_set():
    """After a packed pass with gradient checkpointing the model's attention stays ours, and has no plan."""
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    decision_states(model, compile_calls(mem1_calls(0)), "dense")
    assert model.config._attn_implementation == NAME
    assert head_of(model).weight is model.lm_head.weight
    assert model.config._attn_implementation == NAME
