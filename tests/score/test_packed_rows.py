"""Padded rows with masks in, the same shape out: every row as if it ran alone, without its padding."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from calls import mixed_calls

import memopd
from memopd.compile import compile_calls
from memopd.score import packed_logprobs, packed_rows
from memopd.types import Call
from memopd.verify.families import VOCABULARY, tiny_model

TEMPERATURE = 0.7
PAD = 1


def alone(model, prompt, completion) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and entropy from a softmax over the model's own logits."""
    ids = torch.tensor([[*prompt, *completion]])
    p = (model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).softmax(-1)
    sampled = p.gather(-1, torch.tensor(completion).long()[:, None])[:, 0]
    return sampled.log(), -(p * p.log()).sum(-1)


def pairs() -> list[tuple[list[int], list[int]]]:
    """Calls of many lengths that share prefixes, one of them repeated."""
    return [(c.prompt.tolist(), c.completion.tolist()) for c in mixed_calls(4)]


def trainer_rows(calls, left: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As trainers pad: prompts to one width on their left (or nowhere), completions to one width on their right."""
    before, after = (max(len(c[i]) for c in calls) for i in (0, 1))
    width = before + after if left else max(len(p) + len(c) for p, c in calls)
    ids = torch.full((len(calls), width), PAD)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(calls):
        start = before - len(prompt) if left else 0
        stop = start + len(prompt) + len(completion)
        ids[row, start:stop], mask[row, start:stop] = torch.tensor([*prompt, *completion]), 1
    return ids, mask, after if left else width - 1


def sampled_mask(calls, kept: int, left: bool) -> torch.Tensor:
    mask = torch.zeros(len(calls), kept)
    for row, (prompt, completion) in enumerate(calls):
        start = 0 if left else len(prompt) - 1
        mask[row, start : start + len(completion)] = 1
    return mask


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2", dtype=torch.float64)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("budget", [None, 60])
def test_rows_are_the_calls_alone(model, left, budget):
    calls = pairs()
    ids, mask, kept = trainer_rows(calls, left)
    sampled = sampled_mask(calls, kept, left)
    logprobs, entropies = packed_rows(
        model, ids, mask, kept, None if left else sampled, temperature=TEMPERATURE, budget=budget
    )
    assert logprobs.shape == entropies.shape == sampled.shape
    for row, call in enumerate(calls):
        for actual, wanted in zip((logprobs, entropies), alone(model, *call), strict=True):
            assert (actual[row, sampled[row].bool()] - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    for values in (logprobs, entropies):
        assert (values[sampled == 0] == 0).all()
        assert (values[sampled == 1] != 0).all()


def test_gradients_are_those_of_the_calls_alone(model):
    calls = pairs()
    ids, mask, kept = trainer_rows(calls, left=True)
    weights = torch.randn(2, len(calls), kept, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradient(values) -> torch.Tensor:
        loss = sum((w * v).sum() for w, v in zip(weights, values, strict=True))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    packed = gradient(packed_rows(model, ids, mask, kept, temperature=TEMPERATURE))
    padded = [[torch.nn.functional.pad(x, (0, kept - len(x))) for x in alone(model, *call)] for call in calls]
    wanted = gradient(torch.stack(column) for column in zip(*padded, strict=True))
    # The model's norms run in float32. In the backward pass, the gradients of shared rows are summed before them.
    assert (packed - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_tokens_between_that_were_read_and_not_sampled(model):
    """A tool's answer inside the completion is context for what follows it; it gets zeros."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11]])
    sampled = torch.tensor([[1, 0, 0, 1], [0, 0, 1, 1]])
    some = packed_rows(model, ids, torch.ones_like(ids), 4, sampled)
    every = packed_rows(model, ids, torch.ones_like(ids), 4)
    for a, b in zip(some, every, strict=True):
        assert (a - b * sampled).abs().max() <= 1e-12 * b.abs().max()
        assert (a[sampled == 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16])
def test_masks_of_any_type(model, dtype):
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, PAD]])
    mask, sampled = (ids != PAD).long(), torch.tensor([[0, 1], [1, 0]])
    expected = packed_rows(model, ids, mask, 2, sampled)
    assert all(map(torch.equal, packed_rows(model, ids, mask.to(dtype), 2, sampled.to(dtype)), expected))


def test_rows_without_a_sampled_token_are_zeros_that_have_a_gradient(model):
    ids, mask = torch.tensor([[5, 6, 7, PAD], [5, 6, 8, 9]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    both = packed_rows(model, ids, mask, 2)
    for values, alone_values in zip(both, packed_rows(model, ids[1:], mask[1:], 2), strict=True):
        assert (values[0] == 0).all()
        assert torch.equal(values[1:], alone_values)
    logprobs, entropies = packed_rows(model, ids[:1], mask[:1], 2)
    (logprobs.sum() + entropies.sum()).backward()
    assert (model.lm_head.weight.grad == 0).all()
    model.zero_grad()


def test_entropies_of_calls(model):
    calls = [Call(*pair) for pair in pairs()]
    logprobs, entropies = packed_logprobs(model, calls, temperature=TEMPERATURE, entropies=True)
    only = packed_logprobs(model, calls, temperature=TEMPERATURE)
    assert all(map(torch.equal, only, logprobs))
    for call, entropy in zip(calls, entropies, strict=True):
        wanted = alone(model, call.prompt.tolist(), call.completion.tolist())[1]
        assert (entropy - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_a_uniform_distribution_by_hand():
    """Equal logits over the whole vocabulary: log p = -log V, and the entropy is log V."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        logprobs, entropies = memopd.packed_rows(model, torch.tensor([[5, 6, 7]]), torch.ones(1, 3), 2)
    uniform = torch.tensor(float(VOCABULARY)).log()
    assert torch.allclose(entropies, uniform.expand(1, 2))
    assert torch.allclose(logprobs, -uniform.expand(1, 2))


# ---- every check can fail -----------------------------------------------------------------------------------


def shifted(packed):
    positions = packed.positions.copy()
    positions[-1] += 1
    return replace(packed, positions=positions)


def widened(packed):
    ends = packed.exit.copy()
    ends[(ends < len(packed)).argmax()] += 1
    return replace(packed, exit=ends)


@pytest.mark.parametrize("corrupt", [shifted, widened])
def test_a_corrupted_pack_fails_the_comparison(model, corrupt, monkeypatch):
    monkeypatch.setattr(import_module("memopd.score.score"), "compile_calls", lambda c: corrupt(compile_calls(c)))
    with pytest.raises(AssertionError):
        test_rows_are_the_calls_alone(model, left=True, budget=None)


# ---- refusals -----------------------------------------------------------------------------------------------


IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("ids", "mask", "kept", "completion", "said"),
    [
        (IDS, [[1, 0, 1, 1]], 2, None, "attention_mask: row 0 has padding between its tokens: pad on the left and"),
        (IDS, [[0, 0, 0, 0]], 2, None, "attention_mask: row 0 is all padding: leave it out of the batch"),
        (IDS, [[1, 1, 2, 2]], 2, None, "attention_mask must hold only 0 and 1"),
        (IDS, [[1, 1, 1]], 2, None, r"must both be \[rows, columns\], got \[1, 4\] and \[1, 3\]"),
        (IDS[0], [1, 1, 1, 1], 2, None, r"must both be \[rows, columns\], got \[4\] and \[4\]"),
        (IDS, [[1, 1, 1, 1]], 4, None, "logits_to_keep must be 1 to 3, .* got 4"),
        (IDS, [[1, 1, 1, 1]], 0, None, "logits_to_keep must be 1 to 3, .* got 0"),
        (IDS, [[0, 0, 1, 1]], 2, None, "row 0 has no token before the first one to score: lower logits_to_keep"),
        (IDS, [[1, 1, 1, 1]], 2, [[1, 1, 1]], r"completion_mask must have the shape \[1, 2\], .* got \[1, 3\]"),
        (IDS, [[1, 1, 1, 1]], 2, [[1, -1]], "completion_mask must hold only 0 and 1"),
        (IDS * 100, [[1, 1, 1, 1]], 2, None, "outside this model's vocabulary"),
    ],
)
def test_refusals(model, ids, mask, kept, completion, said):
    completion = None if completion is None else torch.tensor(completion)
    with pytest.raises(ValueError, match=said):
        packed_rows(model, ids, torch.tensor(mask), kept, completion)


def test_a_row_over_the_budget_is_named(model):
    with pytest.raises(ValueError, match=r"call 0 of 1 \(row 0\) needs 3 rows and the budget is 2"):
        packed_rows(model, IDS, torch.ones(1, 4), 2, budget=2)
