"""Gradients at Qwen2.5-3B's shape: what sharing rows adds to the rounding of a batch that shares none."""

import pytest
import torch

from benchmarks.shapes import episodes_of, independent, random_model
from memopd.compile import compile_calls
from memopd.models.attention import own_attention
from memopd.score import call_states, decision_states, head_of, vocabulary_scores

MEMORY = 70 * 2**30  # float32 weights and three sets of gradients
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < MEMORY,
    reason="needs a large GPU",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sharing_rows_changes_gradients_no_more_than_batching_the_same_calls(dtype):
    """Both against every call alone; the batch has the calls side by side, through the same kernels."""
    episodes = episodes_of("q2")
    calls = [c for e in episodes for c in e.calls]
    model = random_model("qwen2.5-3b", dtype, "cuda")
    model.gradient_checkpointing_enable()
    model.train()
    decisions = sum(len(c.completion) for c in calls)

    def backward(states, tokens):
        tokens = torch.as_tensor(tokens, device="cuda").long()
        (-vocabulary_scores(head_of(model), states, tokens).logprob.sum() / decisions).backward()

    def taken():
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients

    def together(layout):
        backward(decision_states(model, layout, "cascade"), layout.decisions.token)
        return taken()

    with own_attention(model):
        for call in calls:
            backward(call_states(model, call.path, len(call.prompt) - 1), call.completion)
        alone = taken()

    def distance(gradients):
        squares = sum(float((g.double() - a.double()).square().sum()) for g, a in zip(gradients, alone, strict=True))
        return (squares / sum(float(a.double().square().sum()) for a in alone)) ** 0.5

    shared, unshared = distance(together(compile_calls(calls))), distance(together(independent(episodes)))
    print(f"\n{dtype}: packed {shared:.2e}, side by side {unshared:.2e}")
    assert shared <= 2 * unshared
