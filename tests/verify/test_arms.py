"""What other trainers do with the same calls: rows and lost tokens by hand, errors against a second computation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import mem1_calls

from memopd.compile import mem1_official, persistent_history
from memopd.models.attention import own_attention
from memopd.models.load import load_tokenizer
from memopd.types import Call, Episode
from memopd.verify import arms
from memopd.verify.arms import CausalRuns, alone, official_states, reencode, shared_rows, thoughts
from memopd.verify.audit import audit
from memopd.verify.families import tiny_model

Q, A0, O0, A1, O1, A2 = [5, 6, 7], [10, 11], [20, 21, 22], [30, 31, 32], [40], [50, 51]
MEM1 = Episode("e", "t", [Call(Q, A0), Call(Q + A0 + O0, A1), Call(Q + A1 + O1, A2)])
GROWING = Episode("g", "t", [Call(Q, A0), Call(Q + A0 + O0, A1), Call(Q + A0 + O0 + A1 + O1, A2)])
REWRITTEN = Episode("r", "t", [Call(Q, A0), Call([*Q, 10, 99, *O0], A1)])  # the prompt writes 99 for 11


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2", dtype=torch.float64)


def counts(arm) -> tuple[str, int, int, int, int]:
    return arm.arm, arm.sequences, arm.rows, arm.shared_rows, arm.lost


def test_what_the_arms_cost_under_mem1s_rule(model):
    """Alone: 4 + 10 + 8 = 22 rows. Flat: 3 + 2 + 3 + 3 + 1 + 1 = 13. Forked: 10 + 8, of which q is common."""
    report = audit(model, [MEM1], "dense")
    assert report.equivalence.tokens == 22
    assert [counts(a) for a in report.arms] == [
        ("persistent history", 1, 13, 13, 0),
        ("fork", 2, 18, 15, 0),
        ("realign", 2, 18, 15, 0),
        ("mem1-official", 1, 13, 13, 0),
    ]
    assert report.equivalence.rows == 15  # what forked sequences could come down to at best is our packing
    persistent, fork, realign, official = report.arms
    assert persistent.p99_logprob == report.representations[0].p99_logprob > 0.01
    assert fork.max_logprob <= 1e-12
    assert (fork.top1, fork.top1_changed, fork.false_clip) == (1, 0, 0)
    assert replace(realign, arm="fork") == fork
    assert official.p99_logprob > 0.01


def test_what_the_arms_cost_where_the_context_only_grows(model):
    """One sequence serves all, and is right. MEM1's mask has no meaning here."""
    report = audit(model, [GROWING], "dense")
    assert [counts(a) for a in report.arms] == [
        ("persistent history", 1, 13, 13, 0),
        ("fork", 1, 13, 13, 0),
        ("realign", 1, 13, 13, 0),
    ]
    assert all(a.max_logprob <= 1e-12 for a in report.arms)
    assert report.notes == (
        "mem1-official: not measured: episode 'g' does not have MEM1's form: q, the last response, something new",
    )


def test_lost_tokens_are_counted_and_not_compared(model):
    """Realign gives up one token of a_0 and computes 4 rows less than fork. What it keeps is exact."""
    report = audit(model, [MEM1, REWRITTEN], "dense")
    rows = {a.arm: a for a in report.arms}
    assert counts(rows["fork"]) == ("fork", 4, 18 + 4 + 10, 15 + 6, 0)
    assert counts(rows["realign"]) == ("realign", 3, 18 + 10, 15 + 6, 1)
    assert rows["realign"].max_logprob <= 1e-12
    assert rows["realign"].top1 == 1


def test_an_arm_that_keeps_no_token_is_a_note(model):
    """Realign gives up a response that the next prompt does not contain, and nothing is learnt from an aborted one."""
    aborted = Episode("a", "t", [Call(Q, A0), Call([*Q, 40, 41], A2, stop="aborted")])
    report = audit(model, [aborted], "dense")
    assert [a.arm for a in report.arms] == ["persistent history", "fork"]
    assert "realign: not measured: it keeps none of the 2 sampled tokens" in report.notes


def test_a_trainer_that_encodes_text_again_is_wrong_from_there_on(model, monkeypatch):
    def canonical(ids):
        return np.array([10, 77] if ids.tolist() == A0 else ids.tolist(), np.int32)

    monkeypatch.setattr(arms, "reencode", lambda tokenizer: canonical)
    monkeypatch.setattr("memopd.verify.audit.thoughts", lambda tokenizer: lambda ids: 0)
    report = audit(model, [GROWING], "dense", tokenizer=object())
    rows = {a.arm: a for a in report.arms}
    assert rows["realign"].lost == 1
    assert rows["realign"].max_logprob > 1e-3
    assert rows["fork"].max_logprob <= 1e-12


@pytest.mark.parametrize("broken", ["row", "token"])
def test_a_sequence_that_is_wrong_is_found(model, monkeypatch, broken):
    """Mutations of fork: a decision one row too early, or another id in the context."""
    right = arms.fork

    def wrong(episode):
        sequences = right(episode)
        last = sequences[-1]
        if broken == "row":
            moved = replace(last.decisions, row=last.decisions.row - 1)
            return [*sequences[:-1], replace(last, decisions=moved)]
        tokens = last.tokens.copy()
        tokens[1] += 1
        return [*sequences[:-1], replace(last, tokens=tokens)]

    monkeypatch.setattr(arms, "fork", wrong)
    rows = {a.arm: a for a in audit(model, [MEM1], "dense").arms}
    assert rows["fork"].max_logprob > 1e-3
    assert rows["realign"].max_logprob <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("hidden", [None, lambda ids: 2])
def test_mem1_official_against_transformers_own_mask(model, hidden):
    """The same states from a 4-D mask, which is how MEM1's actor passes it."""
    episode = Episode("e", "t", mem1_calls(3))
    packed, visible = mem1_official(episode, hidden)
    with own_attention(model):
        states = model.model(
            input_ids=torch.as_tensor(packed.tokens).long()[None],
            position_ids=torch.as_tensor(packed.positions).long()[None],
            attention_mask=torch.as_tensor(visible)[None, None],
            use_cache=False,
        ).last_hidden_state[0]
    reference = states[torch.as_tensor(packed.decisions.row).long()]
    assert torch.allclose(official_states(model, episode, hidden), reference, rtol=0, atol=1e-12)
    flat = persistent_history(episode)
    apart = (CausalRuns(model, [flat])(flat) - reference).abs().amax(-1)
    assert apart[:6].max() <= 1e-12  # call 0 has no information to read
    assert apart[6:].min() > 1e-6


@torch.no_grad()
def test_a_causal_mask_would_be_the_persistent_history(model, monkeypatch):
    episode = Episode("e", "t", mem1_calls(3))
    flat = persistent_history(episode)
    monkeypatch.setattr(arms, "mem1_official", lambda *_: (flat, np.tri(len(flat), dtype=bool)))
    states = official_states(model, episode, None)
    assert torch.allclose(states, CausalRuns(model, [flat])(flat), rtol=0, atol=1e-12)


def test_a_mask_that_is_too_large_is_not_made(model, monkeypatch):
    monkeypatch.setattr(arms, "LONGEST_MASK", 12)
    report = audit(model, [MEM1], "dense")
    assert [a.arm for a in report.arms] == ["persistent history", "fork", "realign"]
    assert report.notes == ("mem1-official: not measured: its mask has 13 rows, and at most 12 fit",)


@torch.no_grad()
def test_a_sequence_runs_once_for_all_who_need_it(model):
    passes = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    flat, single = persistent_history(GROWING), alone(GROWING.calls)
    causal = CausalRuns(model, [*single, flat])
    states = [causal(s) for s in (*single, flat)]
    hook.remove()
    assert passes == [4, 10, 13]  # the flattened history is what the last call read and sampled
    assert [len(s) for s in states] == [2, 3, 2, 7]
    assert torch.equal(states[3][-2:], states[2])


def test_shared_rows():
    """[q a0] is the beginning of both others, which go different ways after it."""
    sequences = [persistent_history(Episode("e", "t", [Call(q, [1])])) for q in (Q, Q + A0 + O0, [*Q, *A0, 9])]
    assert [len(s) for s in sequences] == [3, 8, 6]
    assert shared_rows(sequences) == 8 + 1


def test_text_of_a_response():
    tokenizer = load_tokenizer(str(Path(__file__).parents[2] / "models" / "student"))
    text = "<think>1: Velm.</think>\n<search>Velm source</search>"
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    assert reencode(tokenizer)(ids).tolist() == ids.tolist()
    one_by_one = np.concatenate([np.asarray(tokenizer(c, add_special_tokens=False)["input_ids"]) for c in text])
    assert len(one_by_one) > len(ids)
    assert reencode(tokenizer)(one_by_one).tolist() == ids.tolist()
    cut = thoughts(tokenizer)(ids)
    assert tokenizer.decode(ids[:cut].tolist()).endswith("</think>")
    assert "</think>" not in tokenizer.decode(ids[: cut - 1].tolist())
    assert thoughts(tokenizer)(ids[cut:]) == 0
