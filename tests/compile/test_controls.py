"""The wrong representations, wrong in exactly the way that is meant."""

import numpy as np
import pytest

from memopd.compile import compile_calls, corrupt, persistent_history, response_mask, trajectory_mask
from memopd.compile.controls import observation, stable_prefix
from memopd.types import Call, Episode, Segment

q, a0, o0, a1, o1, a2 = [1, 2], [10, 11, 12], [20], [30, 31], [40, 41], [50, 51]

FLAT = [1, 2, 10, 11, 12, 20, 30, 31, 40, 41, 50]  # 51, sampled last, needs no row
ROWS = [1, 2, 3, 5, 6, 9, 10]
TOKENS = a0 + a1 + a2
CALLS = [0, 0, 0, 1, 1, 2, 2]

RULES = {
    "mem1": [Call(q, a0), Call(q + a0 + o0, a1), Call(q + a1 + o1, a2)],
    "append-only": [Call(q, a0), Call(q + a0 + o0, a1), Call(q + a0 + o0 + a1 + o1, a2)],
    "suffix of two": [Call(q, a0), Call(q + a0[-2:] + o0, a1), Call(q + a1[-2:] + o1, a2)],
    "suffix of one": [Call(q, a0), Call(q + a0[-1:] + o0, a1), Call(q + a1[-1:] + o1, a2)],
    "nothing retained": [Call(q, a0), Call(q + o0, a1), Call(q + o1, a2)],
}


def with_segments(calls: list[Call], observations: list[list[int]]) -> list[Call]:
    """The same calls, saying where each prompt ends in its observation."""
    recorded = []
    for t, (call, new) in enumerate(zip(calls, observations, strict=True)):
        start = len(call.prompt) - len(new)
        memory, observed = (
            Segment("memory", 2, start, t - 1),
            Segment("observation", start, len(call.prompt), t - 1),
        )
        spans = [Segment("prefix", 0, 2), memory, observed]
        recorded.append(Call(call.prompt, call.completion, segments=spans if t else spans[:1]))
    return recorded


def check_flat(episode: Episode) -> None:
    flat = persistent_history(episode)
    assert flat.tokens.tolist() == FLAT
    assert flat.positions.tolist() == list(range(11))
    assert flat.exit.tolist() == [11] * 11  # causal: every row sees all before it
    assert flat.decisions.row.tolist() == ROWS
    assert flat.decisions.token.tolist() == TOKENS
    assert flat.decisions.call.tolist() == CALLS


@pytest.mark.parametrize("rule", RULES)
def test_persistent_history_from_segments(rule):
    check_flat(Episode("e", "t", with_segments(RULES[rule], [[], o0, o1])))


@pytest.mark.parametrize("rule", RULES)
def test_persistent_history_inferred(rule):
    check_flat(Episode("e", "t", RULES[rule]))


@pytest.mark.parametrize("rule", ["mem1", "append-only"])
def test_the_first_call_may_have_a_context_of_its_own(rule):
    x0 = [5, 6]
    later = {"mem1": [q + a0 + o0, q + a1 + o1], "append-only": [q + x0 + a0 + o0, q + x0 + a0 + o0 + a1 + o1]}
    first = Call(q + x0, a0, segments=[Segment("prefix", 0, 2)] if rule == "append-only" else [])
    z1, z2 = later[rule]
    flat = persistent_history(Episode("e", "t", [first, Call(z1, a1), Call(z2, a2)]))
    assert flat.tokens.tolist() == q + x0 + a0 + o0 + a1 + o1 + a2[:-1]
    assert flat.decisions.row.tolist() == [3, 4, 5, 7, 8, 11, 12]


def test_several_observations_in_one_prompt_are_kept_in_order():
    observed = [Segment("observation", 1, 2), Segment("observation", 3, 5)]
    call = Call([1, 20, 10, 21, 22], [30], segments=[Segment("memory", 2, 3), *observed])
    assert observation(call, np.array([10], np.int32), np.array([10], np.int32), 1).tolist() == [20, 21, 22]
    only_memory = Call([1, 10], [30], segments=[Segment("memory", 1, 2, source=0)])
    assert observation(only_memory, np.array([10], np.int32), np.array([10], np.int32), 1).tolist() == []


def test_a_context_only_call_is_read_but_decides_nothing():
    helper = Call(q + a0 + o0, a1, trainable=False)
    flat = persistent_history(Episode("e", "t", [Call(q, a0), helper, Call(q + a1 + o1, a2)]))
    assert flat.tokens.tolist() == FLAT
    assert flat.decisions.row.tolist() == [1, 2, 3, 9, 10]
    assert flat.decisions.token.tolist() == a0 + a2
    assert flat.decisions.call.tolist() == [0, 0, 0, 2, 2]


def test_one_call_flattens_to_itself():
    flat, packed = persistent_history(Episode("e", "t", [Call(q, a0)])), compile_calls([Call(q, a0)])
    for field in ("tokens", "positions", "exit"):
        assert np.array_equal(getattr(flat, field), getattr(packed, field))
    assert np.array_equal(flat.decisions.row, packed.decisions.row)


def test_append_only_flattening_is_exact_and_mem1_is_not():
    """Where the context only grows, the flattened history is the pack: nothing is wrong with it."""
    grown = persistent_history(Episode("e", "t", RULES["append-only"]))
    packed = compile_calls(RULES["append-only"])
    assert np.array_equal(grown.tokens, packed.tokens)
    assert np.array_equal(grown.exit, packed.exit)
    assert np.array_equal(grown.decisions.row, packed.decisions.row)
    assert len(persistent_history(Episode("e", "t", RULES["mem1"]))) != len(compile_calls(RULES["mem1"]))


def test_stable_prefix():
    calls = RULES["mem1"]
    assert stable_prefix(Episode("e", "t", calls)) == 2
    assert stable_prefix(Episode("e", "t", RULES["append-only"])) == 2
    assert stable_prefix(Episode("e", "t", calls[:1])) == 2
    marked = [Call(q, a0, segments=[Segment("prefix", 0, 1)]), *calls[1:]]
    assert stable_prefix(Episode("e", "t", marked)) == 1  # what was recorded goes before what could be inferred


# ---- corrupted states ---------------------------------------------------------------------------------------


def test_corruption_stays_within_each_tree():
    packed = compile_calls([Call([1, 2], [3]), Call([1, 4], [5]), Call([7, 8], [9, 9]), Call([7, 6], [5])])
    assert packed.tokens.tolist() == [1, 2, 4, 7, 8, 9, 6]
    assert packed.exit.tolist() == [3, 2, 3, 7, 6, 6, 7]
    assert packed.positions.tolist() == [0, 1, 1, 0, 1, 2, 1]
    all_of_the_tree, running = [3, 3, 3, 7, 7, 7, 7], [0, 1, 2, 0, 1, 2, 3]

    seen = corrupt(packed, visibility=True)
    assert seen.exit.tolist() == all_of_the_tree
    assert np.array_equal(seen.positions, packed.positions)
    moved = corrupt(packed, positions=True)
    assert moved.positions.tolist() == running
    assert np.array_equal(moved.exit, packed.exit)
    both = corrupt(packed, visibility=True, positions=True)
    assert (both.exit.tolist(), both.positions.tolist()) == (all_of_the_tree, running)
    neither = corrupt(packed)
    assert (neither.exit.tolist(), neither.positions.tolist()) == (packed.exit.tolist(), packed.positions.tolist())
    for wrong in (seen, moved, both, neither):
        assert np.array_equal(wrong.tokens, packed.tokens)
        assert wrong.decisions is packed.decisions
        assert wrong.exit.dtype == wrong.positions.dtype == np.int32


def test_corruption_leaves_the_original_alone():
    packed = compile_calls(RULES["mem1"])
    before = packed.exit.copy(), packed.positions.copy()
    corrupt(packed, visibility=True, positions=True)
    assert np.array_equal(packed.exit, before[0])
    assert np.array_equal(packed.positions, before[1])


def test_a_call_alone_has_no_state_to_corrupt():
    packed = compile_calls([Call(q, a0)])
    wrong = corrupt(packed, visibility=True, positions=True)
    assert np.array_equal(wrong.exit, packed.exit)
    assert np.array_equal(wrong.positions, packed.positions)


# ---- wrong domains ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_the_trajectory_mask_counts_observations(rule):
    """Σ|a_t| + Σ|o_t|: 7 sampled and 3 that the environment wrote."""
    flat = persistent_history(Episode("e", "t", RULES[rule]))
    mask = trajectory_mask(flat, len(q))
    assert mask.shape == (len(flat),)
    assert mask.sum() == 7 + len(o0) + len(o1)
    spurious = np.flatnonzero(mask).tolist()
    assert sorted(set(spurious) - set(ROWS)) == [4, 7, 8]  # the rows before 20, 40 and 41
    assert set(ROWS) <= set(spurious)


def test_the_response_mask_counts_the_context_again():
    """Σ|a_t| + Σ|x_t|, x_t the prompt without q."""
    calls = RULES["mem1"]
    masks = [response_mask(call, len(q)) for call in calls]
    assert [len(m) for m in masks] == [4, 7, 7]
    assert [int(m.sum()) for m in masks] == [3, 4 + 2, 4 + 2]
    assert sum(int(m.sum()) for m in masks) == 7 + (0 + len(a0 + o0) + len(a1 + o1))
    assert np.flatnonzero(masks[1]).tolist() == [1, 2, 3, 4, 5, 6]
