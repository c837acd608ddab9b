"""Packed = every call alone, for every family; and each check shown able to fail."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from calls import mem1_calls, mixed_calls

from memopd.compile import Decisions, Packed, compile_calls, corrupt
from memopd.models.attention import NAME
from memopd.types import Call
from memopd.verify import equivalence, gradient_equivalence
from memopd.verify.distance import difference, p99
from memopd.verify.families import FAMILIES, tiny_model

# With so few bits rounding alone changes which experts a row is sent to: no tolerance on logits holds there.
EXPERTS = {"qwen3-moe", "gpt-oss (sinks, mixed windows)"}
UNSHARED = {"qwen3-next (linear attention)", "mamba2 (recurrent)", "bloom (own attention)"}


@cache
def model_of(family: str, dtype: torch.dtype = torch.float64):
    return tiny_model(family, dtype=dtype)


# ---- every family, in float64 -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float64(family, seed):
    calls = mixed_calls(seed)
    report = equivalence(model_of(family), calls, "dense")
    assert report.max_logit_error / report.logit_scale <= (1e-6 if "gemma2" in family else 1e-12)
    assert report.passed
    assert report.shared == (family not in UNSHARED)
    assert report.top1_agreement == 1
    assert report.false_clip == 0
    assert report.calls == sum(c.trainable for c in calls)
    assert report.decisions == sum(len(c.completion) for c in calls if c.trainable)
    assert report.tokens == sum(len(c.prompt) + len(c.completion) - 1 for c in calls if c.trainable)
    assert report.rows == len(compile_calls(calls)) < report.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_float64(family):
    report = gradient_equivalence(model_of(family), mixed_calls(1), "dense")
    assert report.difference <= 1e-6
    assert report.passed
    assert report.reordering <= 1e-6
    if family in UNSHARED:
        assert report.difference <= 1e-12  # the same passes, in the same order


@pytest.mark.parametrize("only", ["packed", "alone"])
def test_a_parameter_with_a_gradient_in_one_run_only_is_a_problem(only):
    """Its gradient is zero, so the numbers alone would not show that one of the runs used another computation."""
    model = tiny_model("qwen2", dtype=torch.float64)
    model.model.extra = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def use(module, args, output):
        if (module.config._attn_implementation == NAME) == (only == "packed"):
            output.last_hidden_state = output.last_hidden_state + 0 * module.extra
        return output

    model.model.register_forward_hook(use)
    report = gradient_equivalence(model, mem1_calls(0), "dense")
    said = "a gradient only when packed" if only == "packed" else "no gradient when packed"
    assert report.problems == (f"model.extra: has {said}",)
    assert report.error <= report.tolerance
    assert report.passed is False


@pytest.mark.parametrize("budget", [1, 40, 70])
def test_any_budget(budget):
    """A budget under the longest call is raised to it: nothing is ever cut."""
    calls = mixed_calls(3)
    whole = equivalence(model_of("qwen3"), calls, "dense")
    report = equivalence(model_of("qwen3"), calls, "dense", budget=budget)
    assert report.passed
    assert whole.rows < report.rows <= report.tokens
    assert gradient_equivalence(model_of("qwen3"), calls, "dense", budget=budget).passed


# ---- float32 and below --------------------------------------------------------------------------------------


def check_float32(family: str, seed: int) -> None:
    report = equivalence(tiny_model(family, seed), mixed_calls(seed), "dense")
    assert report.passed, (family, seed, report)
    assert report.top1_agreement == 1, (family, seed)
    assert report.false_clip == 0, (family, seed)
    assert "float64" in report.tolerance_source


@pytest.mark.parametrize("seed", range(100))
def test_float32(seed):
    """A hundred random models and as many sets of calls, the families in turn."""
    check_float32(list(FAMILIES)[seed % len(FAMILIES)], seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_every_seed_of_every_family(family):
    for seed in range(100):
        check_float32(family, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_every_seed_of_every_family(family):
    for seed in range(100):
        model = tiny_model(family, seed, torch.float64)
        assert equivalence(model, mixed_calls(seed), "dense").passed, seed
        assert gradient_equivalence(model, mixed_calls(seed), "dense").passed, seed


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in EXPERTS])
def test_low_precision_is_judged_against_float32(family, dtype, seed):
    report = equivalence(model_of(family, dtype), mixed_calls(seed), "dense")
    assert report.passed, report
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert "float32" in report.tolerance_source
    assert report.error > 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3 (mixed windows)", "gpt-oss (sinks, mixed windows)"])
def test_gradients_in_float32(family):
    report = gradient_equivalence(model_of(family, torch.float32), mixed_calls(0), "dense")
    assert report.passed, report
    assert 0 < report.difference < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_nan_weights_fail(dtype):
    model = tiny_model("qwen2", dtype=dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    assert equivalence(model, mem1_calls(0), "dense").passed is False


def test_weights_that_turn_to_nan_fail():
    """The same, of a model that was good when it was first seen."""
    model = tiny_model("qwen2", dtype=torch.float64)
    assert equivalence(model, mem1_calls(0), "dense").passed
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    assert equivalence(model, mem1_calls(0), "dense").passed is False


def test_the_models_own_attention_is_left_as_it_was():
    model = tiny_model("llama")
    for before in ("eager", "sdpa"):
        model.set_attn_implementation(before)
        equivalence(model, mem1_calls(0), "dense")
        gradient_equivalence(model, mem1_calls(0), "dense")
        assert model.config._attn_implementation == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("check", [equivalence, gradient_equivalence])
def test_without_a_trainable_call_there_is_nothing_to_check(check):
    for calls in ([], [Call([5, 6], [7], trainable=False)]):
        with pytest.raises(ValueError, match="there is no trainable call to compile"):
            check(tiny_model("llama"), calls, "dense")


def test_the_report_is_plain_data():
    report = equivalence(model_of("llama"), mem1_calls(0), "dense").as_dict()
    assert report["passed"] is True
    assert report["attention"] == "dense"
    assert report["problems"] == ()
    assert all(isinstance(v, bool | int | float | str | tuple | None) for v in report.values())


# ---- it can fail --------------------------------------------------------------------------------------------

CALLS = mem1_calls(0)  # call 0's rows begin call 1; calls 2 and 3 branch off at q's end
PACKED = compile_calls(CALLS)
BRANCH = int(PACKED.exit[10])  # the first row of call 2's own


def with_value(field: str, at: int, value: int) -> Packed:
    array = getattr(PACKED, field).copy()
    array[at] = value
    return replace(PACKED, **{field: array})


def with_decisions(which: list[int]) -> Packed:
    d = PACKED.decisions
    return replace(PACKED, decisions=Decisions(d.row[which], d.token[which], d.call[which]))


def with_decision_on(decision: int, row: int) -> Packed:
    rows = PACKED.decisions.row.copy()
    rows[decision] = row
    return replace(PACKED, decisions=replace(PACKED.decisions, row=rows))


DECISIONS = list(range(len(PACKED.decisions)))
STATE_MUTATIONS = {
    "a position shifted, first row": with_value("positions", 0, 1),
    "a position shifted, shared": with_value("positions", 7, 8),
    "a position shifted, in a branch": with_value("positions", BRANCH + 3, PACKED.positions[BRANCH + 3] - 1),
    "a position shifted, last row": with_value("positions", len(PACKED) - 1, PACKED.positions[-1] + 1),
    "an exit widened by one": with_value("exit", 10, BRANCH + 1),
    "an exit widened by a branch": with_value("exit", 10, len(PACKED)),
    "an exit widened on a leaf": with_value("exit", BRANCH - 1, BRANCH + 1),
    "an exit narrowed by one": with_value("exit", 3, len(PACKED) - 1),
    "an exit narrowed to the prefix": with_value("exit", 2, 10),
    "a decision on the wrong row": with_decision_on(5, int(PACKED.decisions.row[5]) + 1),
    "a decision on another call's row": with_decision_on(DECISIONS[-1], 9),
}
DOMAIN_MUTATIONS = {
    "the first decision dropped": with_decisions(DECISIONS[1:]),
    "a decision dropped": with_decisions(DECISIONS[:8] + DECISIONS[9:]),
    "the last decision dropped": with_decisions(DECISIONS[:-1]),
}
DOUBLED = {
    "the first decision doubled": with_decisions([0, *DECISIONS]),
    "a decision doubled": with_decisions(DECISIONS[:9] + DECISIONS[8:]),
    "the last decision doubled": with_decisions([*DECISIONS, DECISIONS[-1]]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutation", [*STATE_MUTATIONS, *DOMAIN_MUTATIONS, *DOUBLED])
def test_a_broken_pack_does_not_pass(mutation, dtype):
    broken = {**STATE_MUTATIONS, **DOMAIN_MUTATIONS, **DOUBLED}[mutation]
    report = equivalence(model_of("qwen2", dtype), CALLS, "dense", packs=[broken])
    assert report.passed is False
    assert report.problems


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mutation", STATE_MUTATIONS)
def test_a_wrong_state_shows_in_the_numbers_alone(mutation, dtype):
    report = equivalence(model_of("qwen2", dtype), CALLS, "dense", packs=[STATE_MUTATIONS[mutation]])
    assert report.error > 10 * report.tolerance
    assert report.max_logit_error > 10 * report.tolerance


@pytest.mark.parametrize("mutation", DOMAIN_MUTATIONS)
def test_a_dropped_decision_shows_in_the_numbers_alone(mutation):
    """Its state is missing, or its successors stand one place early: either is no number within a tolerance."""
    report = equivalence(model_of("qwen2"), CALLS, "dense", packs=[DOMAIN_MUTATIONS[mutation]])
    assert not report.error <= report.tolerance


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNSHARED))
@pytest.mark.parametrize("wrong", [{"visibility": True}, {"positions": True}], ids=["visibility", "positions"])
def test_every_family_notices_corruption(family, wrong):
    """So that no family passes because it ignores what packing must get right."""
    broken = corrupt(compile_calls(CALLS), **wrong)
    report = equivalence(model_of(family), CALLS, "dense", packs=[broken])
    assert report.error > 1e3 * report.tolerance
    assert report.passed is False


def test_the_worst_decision_is_located():
    broken = with_decision_on(8, int(PACKED.decisions.row[8]) + 1)  # token 2 of call 1
    report = equivalence(model_of("qwen2"), CALLS, "dense", packs=[broken])
    assert (report.worst_call, report.worst_position) == (1, 2)


def test_the_worst_call_is_counted_among_all_calls():
    calls = [Call([5, 6], [7, 8], trainable=False), *CALLS]
    packed = compile_calls(calls)
    rows = packed.decisions.row.copy()
    rows[8] += 1
    broken = replace(packed, decisions=replace(packed.decisions, row=rows))
    report = equivalence(model_of("qwen2"), calls, "dense", packs=[broken])
    assert (report.worst_call, report.worst_position) == (2, 2)
    assert [p.split(":")[0] for p in report.problems] == ["call 2"]


# ---- the numbers by hand ------------------------------------------------------------------------------------


def test_differences_by_hand():
    """Ratios e^0.3 and e^-0.3 are outside [0.8, 1.2]; e^0.1 is not."""
    delta, same = torch.tensor([0.1, 0.3, -0.3, 0.0]), torch.tensor([True, False, True, True])
    d = difference(torch.tensor([0.5, 2.0, 1.0, 0.0]), delta, same)
    assert (d.max_logit, d.worst, d.top1, d.false_clip) == (2.0, 1, 0.75, 0.5)
    assert d.max_logprob == pytest.approx(0.3)
    assert d.p99_logprob == pytest.approx(0.3)
    assert p99(torch.arange(101.0)) == 99.0
    assert np.isnan(difference(torch.tensor([np.nan]), torch.tensor([0.0]), torch.tensor([True])).max_logit)
