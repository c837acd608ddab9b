"""Every way to break a pack is caught, wherever in the pack it is done."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from calls import mem1_calls, mixed_calls

from memopd.compile import Decisions, Packed, compile_calls, corrupt, fill
from memopd.types import Call
from memopd.verify import structural_problems


def changed(array: np.ndarray, at: int, value: int) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


def reordered(packed: Packed, which: list[int]) -> Packed:
    d = packed.decisions
    return replace(packed, decisions=Decisions(d.row[which], d.token[which], d.call[which]))


def on_row(packed: Packed, decision: int, row: int) -> Packed:
    return replace(packed, decisions=replace(packed.decisions, row=changed(packed.decisions.row, decision, row)))


def positions_shifted(packed: Packed) -> Iterator[Packed]:
    for r in range(len(packed)):
        for by in (-1, 1):
            yield replace(packed, positions=changed(packed.positions, r, packed.positions[r] + by))


def exits_widened(packed: Packed) -> Iterator[Packed]:
    for r in range(len(packed)):
        for exit in range(packed.exit[r] + 1, len(packed) + 1):
            yield replace(packed, exit=changed(packed.exit, r, exit))


def exits_narrowed(packed: Packed) -> Iterator[Packed]:
    for r in range(len(packed)):
        for exit in range(r, packed.exit[r]):
            yield replace(packed, exit=changed(packed.exit, r, exit))


def decisions_dropped(packed: Packed) -> Iterator[Packed]:
    everything = list(range(len(packed.decisions)))
    for d in everything:
        yield reordered(packed, everything[:d] + everything[d + 1 :])


def decisions_doubled(packed: Packed) -> Iterator[Packed]:
    everything = list(range(len(packed.decisions)))
    for d in everything:
        yield reordered(packed, [*everything[: d + 1], d, *everything[d + 1 :]])


def decisions_swapped(packed: Packed) -> Iterator[Packed]:
    """Two neighbours of one call: the tokens are all there, in another order."""
    everything, call, token = list(range(len(packed.decisions))), packed.decisions.call, packed.decisions.token
    for d in everything[:-1]:
        if call[d] == call[d + 1] and token[d] != token[d + 1]:
            yield reordered(packed, [*everything[:d], d + 1, d, *everything[d + 2 :]])


def decisions_on_the_wrong_row(packed: Packed) -> Iterator[Packed]:
    for d in range(len(packed.decisions)):
        for row in set(range(len(packed))) - {int(packed.decisions.row[d])}:
            yield on_row(packed, d, row)


def tokens_changed(packed: Packed) -> Iterator[Packed]:
    for r in range(len(packed)):
        yield replace(packed, tokens=changed(packed.tokens, r, packed.tokens[r] + 1))


def sampled_tokens_changed(packed: Packed) -> Iterator[Packed]:
    d = packed.decisions
    for i in range(len(d)):
        yield replace(packed, decisions=replace(d, token=changed(d.token, i, d.token[i] + 1)))


MUTATIONS: dict[str, Callable[[Packed], Iterator[Packed]]] = {
    "a position shifted": positions_shifted,
    "an exit widened": exits_widened,
    "an exit narrowed": exits_narrowed,
    "a decision dropped": decisions_dropped,
    "a decision doubled": decisions_doubled,
    "decisions swapped": decisions_swapped,
    "a decision on the wrong row": decisions_on_the_wrong_row,
    "a token changed": tokens_changed,
    "a sampled token changed": sampled_tokens_changed,
}

PACKS = {
    "mem1": mem1_calls(0, calls=3, q=4, a=3, o=2),
    "append-only": [Call([1, 2], [3, 4]), Call([1, 2, 3, 4, 5], [6, 7]), Call([1, 2, 3, 4, 5, 6, 7, 8], [9])],
    "two trees": [Call([1, 2], [3, 4]), Call([5, 6, 7], [8, 9]), Call([5, 6], [3])],
    "branches of two and more": [Call([1, 2], [3, 4, 5]), Call([1, 6, 7], [8, 9]), Call([1, 6, 4], [2, 3])],
}


@pytest.mark.parametrize("calls", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_mutation_anywhere_is_caught(mutation, calls):
    """A pack has no slack: any change of any integer is a different state or another domain."""
    packed = compile_calls(calls)
    assert structural_problems([packed], calls) == []
    missed = sum(not structural_problems([wrong], calls) for wrong in MUTATIONS[mutation](packed))
    assert missed == 0


def test_a_row_that_sees_a_strangers_branch_in_the_middle_of_its_path():
    """Row 3 sees row 2 of another call. Row 4, the last of the path, does not."""
    calls = [Call([7, 8], [1, 2]), Call([7, 8, 9], [3, 4])]
    packed = compile_calls(calls)
    assert packed.exit.tolist() == [5, 5, 3, 5, 5]
    wrong = replace(packed, exit=changed(packed.exit, 2, 4))
    assert wrong.path(3).tolist() == [0, 1, 2, 3]
    assert wrong.path(4).tolist() == [0, 1, 3, 4]
    assert structural_problems([wrong], calls)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_of_larger_packs(mutation, seed):
    """One at random of each kind, in calls that share in every way."""
    calls, rng = mixed_calls(seed), np.random.default_rng(seed)
    packed = compile_calls(calls)
    candidates = list(MUTATIONS[mutation](packed))
    for i in rng.choice(len(candidates), min(5, len(candidates)), replace=False):
        assert structural_problems([candidates[i]], calls)


# ---- what is said -------------------------------------------------------------------------------------------


def first(mutation: str, calls: list[Call]) -> list[str]:
    return structural_problems([next(iter(MUTATIONS[mutation](compile_calls(calls))))], calls)


def test_messages_name_the_call():
    calls = [Call([7, 8], [1, 2]), Call([7, 8, 9], [3])]
    assert first("a decision dropped", calls) == ["call 0: 1 decisions for 2 sampled tokens"]
    assert first("a decision doubled", calls) == ["call 0: 3 decisions for 2 sampled tokens"]
    assert first("decisions swapped", calls) == ["call 0: its decisions are not the tokens that were sampled"]
    moved = on_row(compile_calls(calls), 0, 0)
    assert structural_problems([moved], calls) == ["call 0: a decision is not on the row before its token"]


@pytest.mark.parametrize("visibility", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_the_corrupted_controls_are_caught(visibility, positions):
    calls = mem1_calls(0)
    wrong = corrupt(compile_calls(calls), visibility, positions)
    assert bool(structural_problems([wrong], calls)) == (visibility or positions)


def test_packs_must_hold_each_call_once():
    calls = [Call([1, 2], [3]), Call([4, 5], [6]), Call([7], [8], trainable=False)]
    one, two = fill(calls, 2)
    assert structural_problems([one, two], calls) == []
    assert structural_problems([one], calls) == ["call 1: in 0 packs instead of one"]
    assert structural_problems([], calls) == [f"call {i}: in 0 packs instead of one" for i in (0, 1)]
    assert structural_problems([one, two, one], calls) == ["call 0: in 2 packs instead of one"]


def test_a_decision_for_a_call_that_is_not_trained():
    calls = [Call([1, 2], [3]), Call([1, 2], [4])]
    packed = compile_calls(calls)
    helper = [calls[0], replace(calls[1], trainable=False)]
    assert structural_problems([packed], helper) == ["call 1: has decisions but is not a trainable call"]
    assert structural_problems([packed], calls[:1]) == ["call 1: has decisions but is not a trainable call"]
