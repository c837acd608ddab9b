"""The order of the paths and what neighbours share, by hand and against ids compared one by one."""

from itertools import pairwise

import numpy as np
import pytest
from calls import mixed_calls

from memopd.compile import trie
from memopd.compile.trie import Branch, branches, build_trie
from memopd.types import Call

q, a, b, c, d, e, f = range(7)


def on_path(*ids: int) -> Call:
    """A call whose path is `ids`: the one token it sampled predicts nothing."""
    return Call(ids, [99])


def shared(one: list[int], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def shape(node: Branch | int) -> object:
    return node if isinstance(node, int) else (node.depth, node.first, [shape(child) for child in node.children])


def test_the_example_of_the_module():
    built = build_trie([on_path(q, a, b, c), on_path(q, a, b, d, e), on_path(q, f)], [0, 1, 2])
    assert built.order == [0, 1, 2]
    assert built.lcp.tolist() == [0, 3, 1]
    assert built.length.tolist() == [4, 5, 2]


def test_the_last_sampled_token_is_not_on_the_path():
    built = build_trie([Call([q], [a, b]), Call([q], [a, c]), Call([q], [a])], [0, 1, 2])
    assert built.length.tolist() == [2, 2, 1]
    assert built.order == [0, 1, 2]
    assert built.lcp.tolist() == [0, 2, 1]


def test_order_is_by_the_earliest_call_below():
    """Call 3 lies beside call 0, which comes before call 1; among themselves siblings follow the list."""
    built = build_trie([on_path(q, f, a), on_path(q, a), on_path(e), on_path(q, f, b), on_path(d)], range(5))
    assert built.order == [0, 3, 1, 2, 4]
    assert built.lcp.tolist() == [0, 2, 1, 0, 0]


def test_only_the_calls_kept_count():
    built = build_trie([on_path(q, f), on_path(q, a), on_path(q, f)], [1, 2])
    assert built.order == [1, 2]
    assert built.lcp.tolist() == [0, 1]


def test_a_path_that_ends_where_others_branch():
    calls = [on_path(q, a, b), on_path(q, a), on_path(q, a, c), on_path(q, a)]
    built = build_trie(calls, range(4))
    assert built.order == [0, 1, 2, 3]
    assert built.lcp.tolist() == [0, 2, 2, 2]


def test_branches_are_the_inner_nodes():
    #        q a b c   q a b d   q a e   q f   e
    root = branches([0, 1, 2, 3, 4], np.array([0, 3, 2, 1, 0]))
    assert shape(root) == (0, 0, [(1, 0, [(2, 0, [(3, 0, [0, 1]), 2]), 3]), 4])
    #        q   q a b   q a c: the first ends where the others go on
    assert shape(branches([2, 1, 0], np.array([0, 1, 2]))) == (0, 0, [(1, 0, [0, (2, 0, [1, 2])])])
    assert shape(branches([7], np.array([0]))) == (0, 7, [0])
    # A deep node is closed and a shallower one opened in its place.
    assert shape(branches([0, 1, 2], np.array([0, 3, 1]))) == (0, 0, [(1, 0, [(3, 0, [0, 1]), 2])])


@pytest.mark.parametrize("head", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", range(8))
def test_neighbours_share_what_their_ids_say(seed, head, monkeypatch):
    monkeypatch.setattr(trie, "_HEAD", head)
    calls = mixed_calls(seed)
    keep = [i for i, call in enumerate(calls) if call.trainable]
    built = build_trie(calls, keep)
    assert sorted(built.order) == keep
    paths = [[*calls[i].prompt.tolist(), *calls[i].completion[:-1].tolist()] for i in built.order]
    assert built.length.tolist() == [len(p) for p in paths]
    assert built.lcp.tolist() == [0, *(shared(x, y) for x, y in pairwise(paths))]

    rng = np.random.default_rng(seed)
    for _ in range(5):
        places = np.flatnonzero(rng.random(len(keep)) < 0.5)
        if len(places) == 0:
            continue
        some = built.select(places)
        chosen = [paths[p] for p in places]
        assert some.order == [built.order[p] for p in places]
        assert some.length.tolist() == [len(p) for p in chosen]
        assert some.lcp.tolist() == [0, *(shared(x, y) for x, y in pairwise(chosen))]
