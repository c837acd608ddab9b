"""Packs against a trie written out in full, whose nodes are the prefixes themselves."""

from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
import torch
from calls import mem1_calls, mixed_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd.attention.dense import visible
from memopd.compile import Packed, compile_calls, fill, trie, unshared
from memopd.types import Call
from memopd.verify.structure import structural_problems

Prefix = tuple[int, ...]

# ---- the explicit trie --------------------------------------------------------------------------------------


def path_of(call: Call) -> Prefix:
    return (*call.prompt.tolist(), *call.completion[:-1].tolist())


def prefixes(path: Prefix) -> list[Prefix]:
    return [path[: d + 1] for d in range(len(path))]


def earliest(calls: list[Call]) -> dict[Prefix, int]:
    """For every node of the trie, the first call that passes it."""
    first: dict[Prefix, int] = {}
    for i, call in enumerate(calls):
        for node in prefixes(path_of(call)) if call.trainable else ():
            first.setdefault(node, i)
    return first


def nodes_in_order(calls: list[Call], members: list[int]) -> list[Prefix]:
    """The trie of `members`, depth first, siblings by their earliest call. No two siblings have the same one."""
    first = earliest(calls)
    nodes = {node for i in members for node in prefixes(path_of(calls[i]))}
    return sorted(nodes, key=lambda node: [first[ancestor] for ancestor in prefixes(node)])


def check_pack(packed: Packed, calls: list[Call], members: list[int]) -> None:
    """Every array of the pack of calls[i] for i in members."""
    nodes = nodes_in_order(calls, members)
    row = {node: r for r, node in enumerate(nodes)}
    assert packed.tokens.tolist() == [node[-1] for node in nodes]
    assert packed.positions.tolist() == [len(node) - 1 for node in nodes]

    ancestors = [[row[p] for p in prefixes(node)] for node in nodes]
    assert [packed.path(r).tolist() for r in range(len(packed))] == ancestors
    mask = np.zeros((len(nodes), len(nodes)), bool)
    for r, seen in enumerate(ancestors):
        mask[r, seen] = True
    assert np.array_equal(visible(torch.as_tensor(packed.exit)).numpy(), mask)

    wanted = [
        (row[(*calls[i].prompt.tolist(), *calls[i].completion[:k].tolist())], int(token), i)
        for i in members
        for k, token in enumerate(calls[i].completion)
    ]
    d = packed.decisions
    assert list(zip(d.row.tolist(), d.token.tolist(), d.call.tolist(), strict=True)) == wanted

    for i in members:  # the calls, token by token, from the pack alone
        mine = d.call == i
        read = packed.tokens[packed.path(d.row[mine][-1])].tolist()
        assert (*read, d.token[mine][-1]) == (*calls[i].prompt, *calls[i].completion)
        assert d.token[mine].tolist() == calls[i].completion.tolist()


def states_and_tokens(packs: list[Packed]) -> Counter[tuple[bytes, int]]:
    return Counter(
        (packed.tokens[packed.path(row)].tobytes(), int(token))
        for packed in packs
        for row, token in zip(packed.decisions.row, packed.decisions.token, strict=True)
    )


# ---- any trie -----------------------------------------------------------------------------------------------

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@st.composite
def call_lists(draw) -> list[Call]:
    """Calls over three ids, most of them made from an earlier one."""
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 8))):
        prompt, completion = draw(few_ids), draw(few_ids)
        if calls:
            earlier = draw(st.sampled_from(calls))
            before, sampled = earlier.prompt.tolist(), earlier.completion.tolist()
            match draw(st.sampled_from(["new", "same", "prefix", "append", "resample", "memory"])):
                case "same":
                    prompt, completion = before, sampled
                case "prefix":
                    prompt = before[: draw(st.integers(1, len(before)))]
                case "append":
                    prompt = before + sampled + prompt[1:]
                case "resample":
                    prompt = before
                case "memory":
                    prompt = before[:2] + sampled + prompt
        calls.append(Call(prompt, completion, trainable=draw(st.integers(0, 5)) > 0))
    if not any(call.trainable for call in calls):
        calls.append(Call(draw(few_ids), draw(few_ids)))
    return calls


@settings(max_examples=800, deadline=None, derandomize=True, database=None)
@given(st.data(), call_lists(), st.sampled_from([1, 2, 5, 64]))
def test_any_calls_are_rebuilt_exactly(data, calls, head):
    trainable = [i for i, call in enumerate(calls) if call.trainable]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie, "_HEAD", head)  # any value gives the same trie
        packed = compile_calls(calls)
        budget = data.draw(st.integers(max(len(path_of(calls[i])) for i in trainable), len(packed) + 1))
        packs = fill(calls, budget)
        order = data.draw(st.permutations(range(len(calls))))
        shuffled = compile_calls([calls[i] for i in order])

    check_pack(packed, calls, trainable)
    assert len(packed) == len(earliest(calls))

    members = [sorted(set(p.decisions.call.tolist())) for p in packs]
    assert sorted(i for of in members for i in of) == trainable
    for part, of in zip(packs, members, strict=True):
        assert len(part) <= budget
        check_pack(part, calls, of)
    if budget >= len(packed):
        assert len(packs) == 1
    assert structural_problems([packed], calls) == []
    assert structural_problems(packs, calls) == []

    once = states_and_tokens([packed])
    assert states_and_tokens(packs) == once
    assert states_and_tokens([shuffled]) == once
    assert len(shuffled) == len(packed)
    check_pack(shuffled, [calls[i] for i in order], [n for n, i in enumerate(order) if calls[i].trainable])


@pytest.mark.parametrize("seed", range(10))
def test_paths_longer_than_the_sorted_head(seed):
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 9, int(rng.integers(50, 80))).tolist()
    calls = []
    for _ in range(12):
        start = list(calls[rng.integers(len(calls))].prompt) if calls and rng.random() < 0.5 else q
        cut = int(rng.integers(max(1, len(start) - 20), len(start) + 1))
        tail = rng.integers(0, 2, int(rng.integers(0, 30))).tolist()
        calls.append(Call(start[:cut] + tail, rng.integers(0, 2, int(rng.integers(1, 20)))))
    check_pack(compile_calls(calls), calls, list(range(12)))
    budget = max(len(path_of(call)) for call in calls) + 20
    for packed in fill(calls, budget):
        assert len(packed) <= budget
        check_pack(packed, calls, sorted(set(packed.decisions.call.tolist())))


# ---- by hand ------------------------------------------------------------------------------------------------


def test_the_example_of_the_module():
    packed = compile_calls([Call([7, 8], [1, 2]), Call([7, 8, 9], [3])])
    assert packed.tokens.tolist() == [7, 8, 1, 9]
    assert packed.positions.tolist() == [0, 1, 2, 2]
    assert packed.exit.tolist() == [4, 4, 3, 4]
    assert packed.path(3).tolist() == [0, 1, 3]
    assert packed.decisions.row.tolist() == [1, 2, 3]
    assert packed.decisions.token.tolist() == [1, 2, 3]
    assert packed.decisions.call.tolist() == [0, 0, 1]
    assert len(packed) == 4
    assert len(packed.decisions) == 3


def test_mem1_shares_what_is_equal_and_repeats_what_moved():
    """a0 stands where it was sampled, so calls 0 and 1 share it. a1 moved up to q's end, so it is there twice."""
    q, a0, o0, a1, o1, a2 = [1, 2], [10, 11, 12], [20], [30, 31], [40, 41], [50, 51]
    packed = compile_calls([Call(q, a0), Call(q + a0 + o0, a1), Call(q + a1 + o1, a2)])
    #                                 q     a0          o0  a1  a1'     o1      a2
    assert packed.tokens.tolist() == [1, 2, 10, 11, 12, 20, 30, 30, 31, 40, 41, 50]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5, 6]
    assert packed.exit.tolist() == [12, 12, 7, 7, 7, 7, 7, 12, 12, 12, 12, 12]
    assert packed.path(6).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert packed.path(11).tolist() == [0, 1, 7, 8, 9, 10, 11]
    assert packed.decisions.row.tolist() == [1, 2, 3, 5, 6, 10, 11]
    assert packed.decisions.token.tolist() == [10, 11, 12, 30, 31, 50, 51]
    assert packed.decisions.call.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_different_samples_in_one_state_share_its_row():
    packed = compile_calls([Call([5, 6], [7]), Call([5, 6], [8]), Call([5, 6], [7])])
    assert packed.tokens.tolist() == [5, 6]
    assert packed.decisions.row.tolist() == [1, 1, 1]
    assert packed.decisions.token.tolist() == [7, 8, 7]
    assert packed.decisions.call.tolist() == [0, 1, 2]


def test_a_context_only_call_gets_no_rows_and_keeps_its_index():
    packed = compile_calls([Call([5], [6, 7], trainable=False), Call([5, 6], [8])])
    assert packed.tokens.tolist() == [5, 6]
    assert packed.decisions.call.tolist() == [1]


def test_siblings_stand_in_the_order_of_the_calls_not_of_the_ids():
    packed = compile_calls([Call([9, 5], [0]), Call([9, 3], [0]), Call([9, 4], [0]), Call([9, 3, 1], [0])])
    assert packed.tokens.tolist() == [9, 5, 3, 1, 4]


def test_ids_of_all_31_bits_keep_their_order_and_value():
    top = 2**31 - 1
    packed = compile_calls([Call([top, 255], [1]), Call([top, 256], [1]), Call([0], [top, 1])])
    assert packed.tokens.tolist() == [top, 255, 256, 0, top]
    assert packed.positions.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("make", [compile_calls, lambda calls: fill(calls, 100)])
def test_nothing_to_compile(make):
    with pytest.raises(ValueError, match="no trainable call"):
        make([Call([1], [2], trainable=False)])
    with pytest.raises(ValueError, match="no trainable call"):
        make([])


# ---- budgets ------------------------------------------------------------------------------------------------


def test_a_call_over_the_budget_is_named_and_nothing_is_cut():
    calls = [Call([1], [2]), Call([3] * 7, [4] * 4), Call([1], [5])]
    assert sum(len(p) for p in fill(calls, 10)) == 11
    with pytest.raises(ValueError, match=r"call 1 of 3 needs 10 rows and the budget is 9"):
        fill(calls, 9)


def test_a_context_only_call_over_the_budget_does_not_matter():
    assert [len(p) for p in fill([Call([3] * 50, [4], trainable=False), Call([1], [5])], 5)] == [1]


def test_subtrees_stay_together():
    """Two tasks of two calls each: a budget for one task at a time splits between them, not across."""
    a, b = [1] * 6, [2] * 6
    calls = [Call([*a, 3], [0]), Call([*b, 3], [0]), Call([*a, 4], [0]), Call([*b, 4], [0])]
    assert [p.decisions.call.tolist() for p in fill(calls, 8)] == [[0, 2], [1, 3]]
    assert [p.decisions.call.tolist() for p in fill(calls, 16)] == [[0, 1, 2, 3]]


def test_best_fit():
    """Single calls of 6, 5, 4, 3 and 2 rows fill two packs of ten to the brim."""
    calls = [Call([10 + n] * n, [0]) for n in (2, 3, 4, 5, 6)]
    assert sorted(len(p) for p in fill(calls, 10)) == [10, 10]


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_changes_packs_and_nothing_else(seed):
    calls = mixed_calls(seed) + mem1_calls(seed)
    whole = states_and_tokens([compile_calls(calls)])
    longest = max(len(path_of(call)) for call in calls)
    for budget in range(longest, longest + 120, 13):
        packs = fill(calls, budget)
        assert all(len(p) <= budget for p in packs)
        assert states_and_tokens(packs) == whole


@pytest.mark.parametrize("budget", [3_010, 4_000, 1_000_000])
def test_an_append_only_chain_of_3000_calls(budget):
    """A trie 3,000 nodes deep that branches at every one of them."""
    chain = np.arange(3_000, dtype=np.int32) % 50
    calls = [Call(chain[: t + 1], [100 + t, 5, 6]) for t in range(3_000)]
    packs = fill(calls, budget)
    assert all(len(p) <= budget for p in packs)
    assert structural_problems(packs, calls) == []
    if budget == 1_000_000:
        (packed,) = packs
        assert len(packed) == 3_000 + 3_000 * 2
        assert np.array_equal(packed.tokens, compile_calls(calls).tokens)


def test_append_only_context_costs_each_token_once():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 40)
    history, calls = [0], []
    for length in lengths:
        response = rng.integers(1, 99, length).tolist()
        calls.append(Call(history, response))
        history = [*history, *response, 7]
    packed = compile_calls(calls)
    assert len(packed) == len(history) - 2  # the last response's last token and what would follow it
    assert packed.exit.tolist() == [len(packed)] * len(packed)
    starts = list(accumulate(lengths + 1, initial=0))[:-1]
    assert packed.decisions.row.tolist() == [s + k for s, n in zip(starts, lengths, strict=True) for k in range(n)]


def test_unshared_calls_are_whole_and_keep_their_order():
    calls = [Call([1, 2], [3, 4]), Call([1, 2], [5]), Call([9], [9], trainable=False), Call([1, 2], [3])]
    packs = unshared(calls, budget=5)
    assert [p.tokens.tolist() for p in packs] == [[1, 2, 3, 1, 2], [1, 2]]
    assert [p.decisions.call.tolist() for p in packs] == [[0, 0, 1], [3]]
    assert structural_problems(packs, calls) == []
    assert structural_problems(packs[:1], calls) != []


def test_unshared_names_the_mistake_when_no_call_is_trainable():
    with pytest.raises(ValueError, match="no trainable call"):
        unshared([Call([1], [2], trainable=False)], budget=5)
