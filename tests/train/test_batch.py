"""Mini-batches: every decision at its place, whatever pack computed it; who is left out, and why."""

from dataclasses import replace

import numpy as np
import pytest
from calls import mem1_calls, mixed_calls
from tiny import THINK, recorded
from work import function_calls

from memopd.compile import persistent_history
from memopd.config import OptimiseConfig
from memopd.train.batch import compile_batches, draw, mini_batch, parts_of, usable
from memopd.types import Call, Episode, Sampling

EPISODES = [Episode(f"e{s}", f"t{s // 2}", mixed_calls(s), reward=s) for s in range(5)]
LAYOUTS = [
    {"budget": 10_000},
    {"budget": 80},
    {"budget": 80, "micro_batch": 1},
    {"budget": 10_000, "micro_batch": 2},
    {"budget": 10_000, "share": False},
    {"budget": 80, "share": False, "micro_batch": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_decision_has_its_place(layout):
    batch = mini_batch(EPISODES, **layout)
    token = np.full(len(batch), -1)
    state = [None] * len(batch)
    for work in batch.work:
        assert len(work.packed) <= layout["budget"]
        token[work.place] = work.packed.decisions.token
        for place, row in zip(work.place, work.packed.decisions.row, strict=True):
            state[place] = work.packed.tokens[work.packed.path(int(row))].tolist()
    calls = [c for e in EPISODES for c in e.calls if c.trainable]
    assert token.tolist() == [t for c in calls for t in c.completion]
    assert state == [[*c.prompt, *c.completion[:k]] for c in calls for k in range(len(c.completion))]
    assert sum(len(w.place) for w in batch.work) == len(batch)  # none twice
    assert batch.tokens == sum(len(c.path) for c in calls)
    assert (batch.rows == batch.tokens) == (layout.get("share") is False)


def test_owners_and_ends():
    calls = [Call([1, 2], [3, 4], reward=0.5), Call([1], [2], trainable=False, reward=0.25), Call([1, 3], [5])]
    batch = mini_batch([Episode("a", "t", calls), Episode("b", "t", calls[2:])], 100)
    assert batch.episode.tolist() == [0, 0, 0, 1]
    assert batch.call.tolist() == [0, 0, 1, 2]
    assert batch.last.tolist() == [False, False, True, True]
    assert batch.call_last.tolist() == [False, True, True, True]
    assert batch.call_reward.tolist() == [0.75, 0.0, 0.0]  # what the helper's call earned, the one before it gets


def test_no_reward_of_a_call_is_lost():
    """A helper's call before the first trainable one gives its reward to that one: there is no earlier token."""
    helper, act = Call([1], [2], trainable=False, reward=0.25), Call([1, 2], [3, 4], reward=0.5)
    calls = [helper, helper, act, helper, replace(act, reward=1.0), replace(helper, reward=-2.0)]
    batch = mini_batch([Episode("a", "t", calls), Episode("b", "t", [act])], 100)
    assert batch.call_reward.tolist() == [0.25 + 0.25 + 0.5 + 0.25, 1.0 - 2.0, 0.5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_holds_calls_whole(layout):
    """What a loss over calls relies on: numbers and sizes of the calls in each pack, and each call in one pack."""
    batch = mini_batch(EPISODES, **layout)
    seen = []
    for work in batch.work:
        held, number, size = batch.calls_in(work)
        assert held[number].tolist() == batch.call[work.place].tolist()
        assert size.tolist() == [len(batch.calls[i].completion) for i in held]
        seen += held.tolist()
    assert sorted(seen) == list(range(len(batch.calls)))


def test_a_call_that_is_cut_is_noticed():
    batch = mini_batch(EPISODES, 80)
    work = batch.work[0]
    with pytest.raises(AssertionError, match="a call was cut"):
        batch.calls_in(replace(work, place=work.place[:-1]))


def test_packs_of_micro_batches_hold_no_others_calls():
    batch = mini_batch(EPISODES, 10_000, micro_batch=2)
    held = [set(batch.episode[w.place].tolist()) for w in batch.work]
    assert held == [{0, 1}, {2, 3}, {4}]


@pytest.mark.parametrize("budget", [10_000, 200, 100])
def test_persistent_histories_lie_side_by_side_and_have_the_same_places(budget):
    batch = replace(mini_batch(EPISODES, 10_000), budget=budget)
    token = np.full(len(batch), -1)
    state = [None] * len(batch)
    packs = batch.persistent(range(len(EPISODES)))
    assert (len(packs) == 1) == (budget == 10_000)
    for work in packs:
        held = sorted(set(batch.episode[work.place]))
        assert len(work.packed) == sum(len(persistent_history(EPISODES[e])) for e in held)
        assert len(work.packed) <= budget or len(held) == 1
        token[work.place] = work.packed.decisions.token
        for place, row in zip(work.place, work.packed.decisions.row, strict=True):
            path = work.packed.path(int(row))
            assert work.packed.positions[path].tolist() == list(range(len(path)))
            state[place] = work.packed.tokens[path].tolist()
    assert token.tolist() == [t for c in batch.calls for t in c.completion]
    alone = [persistent_history(e) for e in EPISODES]  # one sequence each, as the control is defined
    assert state == [h.tokens[: row + 1].tolist() for h in alone for row in h.decisions.row]
    assert [w.place.tolist() for w in batch.persistent([1, 3])] == [
        np.flatnonzero(np.isin(batch.episode, part)).tolist() for part in ([[1, 3]] if budget == 10_000 else [[1], [3]])
    ]


def test_mini_batches_are_drawn_before_packing_and_the_same_for_every_layout():
    drawn = [
        [[e.id for e in b.episodes] for b in compile_batches(EPISODES, OptimiseConfig(mini_batch=2, **layout), 7, 3)]
        for layout in LAYOUTS
    ]
    assert all(d == drawn[0] for d in drawn)
    assert sorted(id for ids in drawn[0] for id in ids) == [e.id for e in EPISODES]
    assert [len(d) for d in draw(130, 128, 0, 0)] == [65, 65]  # not 128 and 2
    assert [len(d) for d in draw(128, 64, 0, 0)] == [64, 64]
    assert [len(d) for d in draw(3, 64, 0, 0)] == [3]
    assert draw(100, 10, seed=7, step=3) != draw(100, 10, seed=7, step=4) != draw(100, 10, seed=8, step=4)


def test_the_episode_is_the_atom():
    good, calls = Episode("good", "t", mem1_calls(0)), mem1_calls(1)
    longest = max(len(c.path) for c in good.calls)
    flat = len(persistent_history(good))
    assert flat > longest
    helper = Call([1] * 500, [2], trainable=False)
    episodes = [
        good,
        Episode("long", "t", [*calls, Call([1] * 300, [2, 3])]),
        Episode("context", "t", [replace(c, trainable=False) for c in calls]),
        Episode("helped", "t", [helper, calls[0]]),
    ]
    kept, reasons = usable(episodes, 1000, 1.0)
    assert [e.id for e in kept] == ["good", "long", "helped"]
    assert reasons == ["episode 'context': none of its calls is trainable"]
    kept, reasons = usable(episodes, 250, 1.0)
    assert [e.id for e in kept] == ["good", "helped"]
    assert reasons[0] == "episode 'long': a call needs 301 rows and the budget is 250"
    # The calls fit, the flattened history does not: in the control it is a pack by itself.
    assert usable([good], longest, 1.0) == ([good], [])
    assert usable([good], longest - 2, 1.0)[0] == []
    (alone,) = mini_batch([good], longest).persistent([0])
    assert len(alone.packed) == flat


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        (Sampling(top_p=0.9), "top-p or top-k"),
        (Sampling(top_k=50), "top-p or top-k"),
        (Sampling(top_k=1), "was sampled at temperature 0"),
        (Sampling(temperature=0.7), "sampled at temperature 0.7: set sampling.temperature to it"),
    ],
)
def test_another_distribution_is_refused(sampling, complaint):
    with pytest.raises(ValueError, match=complaint):
        usable([Episode("e", "t", mem1_calls(0), sampling=sampling)], 1000, 1.0)


def test_nothing_left():
    """The error has the first reason, and gives no advice that may not help."""
    reason = "episode 'e': none of its calls is trainable"
    with pytest.raises(ValueError, match=f"^step 4: every episode was left out: {reason}$"):
        compile_batches([], OptimiseConfig(), 0, 4, [reason, "another"])


def test_thinking_ends_with_the_token_that_closes_it():
    def decode(ids):
        return "".join("</think>" if i == THINK else "</th" if i == 1 else "ink>" if i == 2 else "x" for i in ids)

    answers = [[5, THINK, 6, THINK], [5, 6, 7 + 1], [THINK, 5], [5, 1, 2, 6, 6]]
    batch = mini_batch([Episode("e", "t", [Call([3], a) for a in answers])], 100)
    assert parts_of(batch, decode).tolist() == [
        *(True, True, False, False),
        *(True, True, True),  # never closed: all of it
        *(True, False),
        *(True, True, True, False, False),  # the tag ends inside the third token
    ]


def test_work_grows_with_the_episodes_not_with_their_square():
    """Ten times the episodes are about ten times the work, never a hundred."""
    few = [replace(e, id=f"{e.id}-{n}") for n in range(2) for e in recorded(episodes=16)]
    many = [replace(e, id=f"{e.id}-{n}") for n in range(10) for e in few]

    def work(episodes):
        kept, _ = usable(episodes, 2048, 1.0)
        parts_of(mini_batch(kept, 2048), lambda ids: "x" * len(ids))

    assert function_calls(lambda: work(many)) < 12 * function_calls(lambda: work(few))
