"""How a scheme reaches the layers of a model, and every way in which it could fail to."""

import threading
from contextlib import ExitStack

import pytest
import torch
import torch._dynamo
import transformers
from calls import mem1_calls, mixed_calls
from torch.nn.functional import scaled_dot_product_attention

from memopd.attention import make_plan
from memopd.attention.dense import DensePlan
from memopd.compile import compile_calls
from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.models.attention import (
    NAME,
    Layer,
    eval_mode,
    own_attention,
    plain_attention,
    planned_attention,
    sampling_attention,
)
from memopd.score import decision_states, head_of, states, vocabulary_scores
from memopd.types import Sampling
from memopd.verify import gradient_equivalence
from memopd.verify.families import FAMILIES, tiny_model

IDS = torch.tensor([[5, 6, 7]])
SHARED = [f for f in FAMILIES if not f.startswith(("qwen3-next", "mamba2", "bloom"))]


def rows_of(packed) -> dict[str, torch.Tensor]:
    ids, positions = (torch.as_tensor(x).long()[None] for x in (packed.tokens, packed.positions))
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


@pytest.fixture
def llama():
    return tiny_model("llama")


@pytest.fixture
def packed():
    return compile_calls(mem1_calls(0))


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHARED)
def test_no_plan(family, packed):
    model = tiny_model(family)
    with pytest.raises(ValueError, match="no plan came with the call"), planned_attention(model):
        model(**rows_of(packed))


def test_generation_inside_a_block_is_refused_too(llama):
    with pytest.raises(ValueError, match="no plan came with the call"), planned_attention(llama):
        llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_mask(mask, llama, packed):
    T = len(packed)
    square = torch.ones(1, 1, T, T, dtype=torch.bool) if mask == "bool" else torch.zeros(1, 1, T, T)
    with pytest.raises(ValueError, match="takes no attention_mask"), planned_attention(llama):
        llama(**rows_of(packed), attention_mask=square, memopd_scheme=make_plan(packed, "dense", llama))


def test_a_plan_outside_of_a_block_is_refused(llama, packed):
    """transformers takes its restarted positions for separate sequences there, and makes a mask."""
    llama.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"takes no attention_mask: .*planned_attention"):
        llama(**rows_of(packed), memopd_scheme=make_plan(packed, "dense", llama))


def test_dropout(packed, monkeypatch):
    """The kernels' own refusal, for a model that keeps its dropout where nobody looks."""
    monkeypatch.setattr(states, "check_dropout", lambda model: None)
    config = FAMILIES["llama"]()
    config.attention_dropout = 0.1
    model = transformers.AutoModelForCausalLM.from_config(config)
    decision_states(model.eval(), packed, "dense")  # off in evaluation
    with pytest.raises(ValueError, match="attention dropout must be 0"):
        decision_states(model.train(), packed, "dense")
    assert model.config._attn_implementation != NAME  # put back on the way out


def test_a_tensor_that_layers_pass_on_and_we_do_not_know(llama, packed):
    said = "LlamaAttention passes bias to its attention, which memopd does not support"
    with pytest.raises(ValueError, match=said), planned_attention(llama):
        llama(**rows_of(packed), bias=torch.zeros(1), memopd_scheme=make_plan(packed, "dense", llama))


def test_an_output_of_another_shape_names_the_kernel(llama, packed):
    class HeadsFirst(DensePlan):
        def attend(self, *inputs):
            return super().attend(*inputs).transpose(1, 2)

    wrong = HeadsFirst(packed, torch.device("cpu"))
    said = r"HeadsFirst.attend must return \[1, rows, query heads, width\]"
    with pytest.raises(ValueError, match=said), planned_attention(llama):
        llama(**rows_of(packed), memopd_scheme=wrong)


# ---- without a plan: transformers' own -----------------------------------------------------------------------


PLAIN = ["llama", "mistral (sliding window)", "gemma3 (mixed windows)"]
CAPPED = ["gemma2 (soft cap, mixed windows)", "gpt-oss (sinks, mixed windows)"]


def plain_results(model, name: str, left: bool) -> tuple[torch.Tensor, ...]:
    """Logits with and without padding, and what the model generates from padded prompts that exceed its windows."""
    model.set_attn_implementation(name)
    ids = torch.randint(3, 131, (3, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in ((0, 9), (1, 3)):
        mask[row, slice(0, padding) if left else slice(-padding, None)] = 0
    with torch.no_grad():
        padded, whole = model(ids, attention_mask=mask).logits[mask.bool()], model(ids).logits
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return padded, whole, tokens


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("left", [True, False])
def test_outside_of_a_block_our_name_is_sdpa(family, left):
    model = tiny_model(family)
    assert all(map(torch.equal, plain_results(model, NAME, left), plain_results(model, "sdpa", left)))


@pytest.mark.parametrize("family", CAPPED)
def test_what_sdpa_leaves_out_is_not_left_out(family):
    """The bound is that of verify: these models compute their own softmax in float32."""
    model = tiny_model(family, dtype=torch.float64)
    ours, eager = plain_results(model, NAME, left=False), plain_results(model, "eager", left=False)
    for a, b in zip(ours[:2], eager[:2], strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    assert torch.equal(ours[2], eager[2])
    left, alone = plain_results(model, NAME, left=True)[:2]
    assert (left[-24:] - alone[2]).abs().max() <= 1e-12 * alone.abs().max()  # row 2 has no padding; none is NaN


def test_a_mask_that_were_dropped_would_show(monkeypatch):
    model = tiny_model("llama")
    expected = plain_results(model, "sdpa", True)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, NAME, lambda *_, **__: None)
    padded, whole, _ = plain_results(model, NAME, True)
    assert torch.equal(whole, expected[1])
    assert (padded - expected[0]).abs().max() > 1e-3


def test_other_threads_run_as_usual_while_one_is_inside(packed):
    model = tiny_model("llama")
    expected, results = model(IDS).logits, []
    with planned_attention(model):
        other = threading.Thread(target=lambda: results.append(model(IDS).logits))
        other.start()
        other.join(20)
        with own_attention(model):  # the same, on this thread
            results.append(model(IDS).logits)
        with pytest.raises(ValueError, match="no plan came with the call"):
            model(IDS)
    assert all(torch.equal(r, expected) for r in results)
    assert len(results) == 2


def test_blocks_that_overlap_restore_when_the_last_one_ends(packed):
    """Of two threads, the first to enter leaves first. The second still scores with its plan."""
    model = tiny_model("llama")
    before, expected = model.config._attn_implementation, decision_states(model, packed, "dense")
    entered, left = threading.Event(), threading.Event()

    def first():
        with planned_attention(model):
            entered.set()
            assert left.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(20)
    with planned_attention(model):
        left.set()
        thread.join(20)
        assert model.config._attn_implementation == NAME
        assert torch.equal(decision_states(model, packed, "dense"), expected)
    assert model.config._attn_implementation == before


# ---- whose attention it is, before and after ----------------------------------------------------------------


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_previous_attention_comes_back(before):
    model = tiny_model("llama")
    model.set_attn_implementation(before)
    with planned_attention(model):
        assert model.config._attn_implementation == NAME
        with planned_attention(model):
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation == NAME
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
    assert model.config._attn_implementation == NAME
    with torch.no_grad():  # the pass between them runs as usual
        kept = model(IDS).logits
        model.set_attn_implementation(before)
        assert torch.equal(kept, model(IDS).logits)
        model.set_attn_implementation(NAME)
    states.sum().backward()


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


# ---- the engine's turn --------------------------------------------------------------------------------------


def test_a_model_in_use_by_an_engine_says_so_to_everybody_else(packed):
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with sampling_attention(model):
        with pytest.raises(ValueError, match="the model is in use by memopd's engine"):
            model(input_ids=IDS, use_cache=False)
        with pytest.raises(ValueError, match="the model is in use by memopd's engine"):
            decision_states(model, packed, "dense")
        with pytest.raises(ValueError, match="the model is in use by memopd's engine"), own_attention(model):
            pass
        with pytest.raises(ValueError, match="in use by another engine"), sampling_attention(model):
            pass
        assert model.config._attn_implementation == NAME  # the refusals changed nothing
        other = tiny_model("llama")
        other.set_attn_implementation(NAME)
        with pytest.raises(ValueError, match="no plan came with the call"):  # it is not this engine's
            other(input_ids=IDS, use_cache=False)
    assert model.config._attn_implementation == before
    decision_states(model, packed, "dense")


def test_two_engines_on_one_model():
    model = tiny_model("llama")
    first = LocalEngine(model, None, slots=1, max_length=64)
    entered, go_on = threading.Event(), threading.Event()

    def wait(_):
        entered.set()
        assert go_on.wait(20)

    ticket = first.submit(Request([5, 6, 7], seed=1, sampling=Sampling(max_tokens=2)), wait)
    assert entered.wait(20)
    try:
        with pytest.raises(ValueError, match="in use by another engine"):
            LocalEngine(model, None, slots=1, max_length=64)
    finally:
        go_on.set()
    assert len(ticket.completion.result(20).tokens) == 2
    LocalEngine(model, None, slots=1, max_length=64)  # the first is done


def test_an_engine_between_a_checkpointed_forward_pass_and_its_backward_pass(packed):
    """The attention stays ours for the backward pass; an engine may sample meanwhile and changes nothing of that."""
    model = tiny_model("llama", dtype=torch.float64).train()
    model.gradient_checkpointing_enable()
    decision_states(model, packed, "dense").sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    out = decision_states(model, packed, "dense")
    engine = LocalEngine(model, None, slots=1, max_length=64)
    assert len(engine.generate([Request([5, 6, 7], seed=1, sampling=Sampling(max_tokens=3))])[0].tokens) == 3
    assert model.config._attn_implementation == NAME
    assert model.training
    out.sum().backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters() if p.grad is not None), expected))


def test_an_engine_that_starts_during_a_checkpointed_forward_pass(packed):
    """It sets the model to eval mode on its thread. The backward pass still runs the layers with our attention."""
    model, undisturbed = (tiny_model("llama", dtype=torch.float64).train() for _ in range(2))
    model.gradient_checkpointing_enable()
    undisturbed.gradient_checkpointing_enable()
    decision_states(undisturbed, packed, "dense").sum().backward()
    entered, scored = threading.Event(), threading.Event()

    def sample():
        with sampling_attention(model):
            entered.set()
            assert scored.wait(20)

    engine = threading.Thread(target=sample)

    def start(*_):
        engine.start()
        assert entered.wait(20)

    hook = model.model.norm.register_forward_hook(start)  # after the last layer
    out = decision_states(model, packed, "dense")
    hook.remove()
    scored.set()
    engine.join(20)
    out.sum().backward()
    for a, b in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert (a.grad is b.grad is None) or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("block", [planned_attention, own_attention])
def test_an_engine_that_starts_inside_a_block_keeps_its_attention_when_the_block_ends(block):
    """The block and the engine are on two threads, so the block may end first. The last one to end restores."""
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with ExitStack() as engine:
        with block(model):
            engine.enter_context(sampling_attention(model))
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    with block(model), sampling_attention(model):  # the usual order
        pass
    assert model.config._attn_implementation == before


def test_modules_go_back_to_the_mode_that_each_had():
    model = tiny_model("llama").train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    with eval_mode(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(KeyError), eval_mode(model):
        raise KeyError
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("kernel", ["cascade", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_compiled_model_is_one_graph_for_every_layer_and_pack(kernel):
    torch._dynamo.reset()
    model = tiny_model("qwen2")
    expected = [decision_states(model, compile_calls(mixed_calls(seed)), kernel) for seed in range(3)]
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for seed, states_alone in enumerate(expected):
        compiled = decision_states(model, compile_calls(mixed_calls(seed)), kernel)
        assert (compiled - states_alone).abs().max() <= 1e-4 * states_alone.abs().max()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# ---- the definition, by hand --------------------------------------------------------------------------------


def test_plain_attention_is_torchs_where_torch_has_it():
    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = scaled_dot_product_attention(q, k, v, visible, scale=0.3)
    assert (plain_attention(q, k, v, visible, Layer(0.3)) - expected).abs().max() < 1e-14


def test_a_soft_cap_and_a_sink_by_hand():
    """Scores 4 and 0 capped at 2 are 2·tanh(2) and 0; a sink at 0 takes a third share and gives nothing."""
    q, k, v = torch.tensor([[[2.0]]]), torch.tensor([[[2.0], [0.0]]]), torch.tensor([[[1.0], [10.0]]])
    everything = torch.ones(1, 2, dtype=torch.bool)
    high = torch.tensor(2.0).tanh().mul(2).exp()
    capped = plain_attention(q, k, v, everything, Layer(1.0, softcap=2.0))
    assert float(capped) == pytest.approx(float((high + 10) / (high + 1)))
    with_sink = plain_attention(q, k, v, everything, Layer(1.0, softcap=2.0, sinks=torch.zeros(1)))
    assert float(with_sink) == pytest.approx(float((high + 10) / (high + 2)))
    first = torch.tensor([[True, False]])
    assert float(plain_attention(q, k, v, first, Layer(1.0))) == 1.0
