"""The wrong representations, wrong in exactly the way that is meant."""

import numpy as np
import pytest

from memopd.compile import (
    compile_calls,
    corrupt,
    fork,
    mem1_official,
    persistent_history,
    realign,
    response_mask,
    trajectory_mask,
)
from memopd.compile.controls import is_mem1, observation, stable_prefix
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


# ---- split and realigned sequences --------------------------------------------------------------------------


def shown(sequences) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Tokens, and the row, token and call of each decision; every sequence is causal with running positions."""
    for s in sequences:
        assert s.positions.tolist() == list(range(len(s)))
        assert s.exit.tolist() == [len(s)] * len(s)
    parts = [(s.tokens, s.decisions.row, s.decisions.token, s.decisions.call) for s in sequences]
    return [tuple(part.tolist() for part in one) for one in parts]


def test_fork_merges_what_only_grew():
    (one,) = shown(fork(Episode("e", "t", RULES["append-only"])))
    assert one == (FLAT, ROWS, TOKENS, CALLS)


def test_fork_splits_where_the_context_was_rewritten():
    """MEM1: call 1 reads all that call 0 read and wrote, so they are one sequence. Call 2 begins another."""
    first, second = shown(fork(Episode("e", "t", RULES["mem1"])))
    assert first == (q + a0 + o0 + a1[:-1], [1, 2, 3, 5, 6], a0 + a1, [0, 0, 0, 1, 1])
    assert second == (q + a1 + o1 + a2[:-1], [5, 6], a2, [2, 2])
    assert len(shown(fork(Episode("e", "t", RULES["nothing retained"])))) == 3


@pytest.mark.parametrize("rule", RULES)
def test_every_forked_decision_sees_what_its_call_read(rule):
    calls, found = RULES[rule], []
    for s in fork(Episode("e", "t", calls)):
        for row, token, t in zip(s.decisions.row, s.decisions.token, s.decisions.call, strict=True):
            k = found.count(t)
            found.append(t)
            read = [*calls[t].prompt, *calls[t].completion[:k]]
            assert s.tokens[: row + 1].tolist() == read
            assert token == calls[t].completion[k]
    assert found == CALLS


def test_a_forked_sequence_without_a_gradient_is_left_out():
    helper = Call([7, 8], [9, 9], trainable=False)
    sequences = fork(Episode("e", "t", [Call(q, a0), helper, Call(q + a0 + o0, a1)]))
    assert [s.decisions.call.tolist() for s in sequences] == [[0, 0, 0], [2, 2]]
    inside = fork(Episode("e", "t", [Call(q, a0, trainable=False), Call(q + a0 + o0, a1)]))
    assert shown(inside) == [(q + a0 + o0 + a1[:-1], [5, 6], a1, [1, 1])]


REWRITTEN = [Call(q, a0), Call([*q, 10, 99, *o0], a1)]  # of 10 11 12, the next prompt repeats 10 alone


def test_realign_replaces_the_end_of_the_last_response():
    """11 and 12 get no gradient: nobody may train on them in a context that now says 99. Fork keeps them."""
    assert shown(realign(Episode("e", "t", REWRITTEN))) == [
        ([*q, 10, 99, *o0, *a1[:-1]], [1, 4, 5], [10, *a1], [0, 1, 1])
    ]
    assert shown(fork(Episode("e", "t", REWRITTEN))) == [
        (q + a0[:-1], [1, 2, 3], a0, [0, 0, 0]),
        ([*q, 10, 99, *o0, *a1[:-1]], [4, 5], a1, [1, 1]),
    ]


def test_realign_loses_a_response_that_begins_otherwise():
    """A prompt without a_0 leaves the sequence at the first token of a_0, which is still within it."""
    calls = [Call(q, a0), Call([*q, 99, *o0], a1)]
    assert shown(realign(Episode("e", "t", calls))) == [([*q, 99, *o0, *a1[:-1]], [3, 4], a1, [1, 1])]


def test_realign_forks_before_the_last_response_and_from_the_threshold_on():
    mem1 = Episode("e", "t", RULES["mem1"])
    assert shown(realign(mem1)) == shown(fork(mem1))  # call 2 leaves the sequence in a_0, not in a_1
    rewritten = Episode("e", "t", REWRITTEN)
    assert len(realign(rewritten, threshold=3)) == 1  # two tokens differ
    assert shown(realign(rewritten, threshold=2)) == shown(fork(rewritten))


def canonical(ids):
    """A tokenizer for which the text of 11 12 is one token, 77."""
    text = np.asarray(ids).tolist()
    return np.array([10, 77] if text == a0 else text, np.int32)


def test_realign_with_a_tokenizer_encodes_earlier_responses_again():
    """The prompts repeat the sampled ids, but the trainer's text has others: it loses 11 12, and the rest reads 77."""
    calls = RULES["append-only"]
    (one,) = shown(realign(Episode("e", "t", calls), canonical))
    assert one == (
        [*q, 10, 77, *o0, *a1, *o1, *a2[:-1]],
        [1, 4, 5, 8, 9],
        [10, *a1, *a2],
        [0, 1, 1, 2, 2],
    )
    last = Episode("e", "t", calls[:1])
    assert shown(realign(last, canonical)) == shown(fork(last))  # nothing comes after it, so nobody encodes it again


# ---- MEM1's own mask ----------------------------------------------------------------------------------------

#        1  2 | 10 11 12 | 20 | 30 31 | 40 41 | 50
OFFICIAL = """
         1  .   .  .  .    .    .  .    .  .    .
         1  1   .  .  .    .    .  .    .  .    .
         1  1   1  .  .    .    .  .    .  .    .
         1  1   1  1  .    .    .  .    .  .    .
         1  1   1  1  1    .    .  .    .  .    .
         .  .   .  .  .    1    .  .    .  .    .
         1  1   1  1  1    1    1  .    .  .    .
         1  1   1  1  1    1    1  1    .  .    .
         .  .   .  .  .    .    .  .    1  .    .
         .  .   .  .  .    .    .  .    1  1    .
         1  1   .  .  .    .    1  1    1  1    1
"""


def test_mem1_official():
    """Flat positions. A response sees q, the response before, its information, itself; information sees only itself."""
    packed, visible = mem1_official(Episode("e", "t", RULES["mem1"]))
    expected = [[cell == "1" for cell in line.split()] for line in OFFICIAL.strip().splitlines()]
    assert visible.tolist() == expected
    assert packed.tokens.tolist() == FLAT
    assert packed.positions.tolist() == list(range(11))
    assert packed.decisions.row.tolist() == ROWS  # row 5, information that sees only itself, predicts 30


def test_mem1_official_may_hide_thoughts():
    """The first token of each response is a thought: the next response does not see it, and nothing else changes."""
    episode = Episode("e", "t", RULES["mem1"])
    _, all_of_it = mem1_official(episode)
    _, visible = mem1_official(episode, lambda response: 1)
    hidden = np.argwhere(all_of_it & ~visible).tolist()
    assert hidden == [[6, 2], [7, 2], [10, 6]]
    assert not (visible & ~all_of_it).any()


@pytest.mark.parametrize(("rule", "its"), list(zip(RULES, [True, False, False, False, False], strict=True)))
def test_what_has_mem1s_form(rule, its):
    assert is_mem1(Episode("e", "t", RULES[rule])) is its
    assert is_mem1(Episode("e", "t", RULES[rule][:1]))


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
