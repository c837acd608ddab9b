"""The trie of a list of calls, represented by an order and one number per call.

A call's *path* is the sequence that the model reads: the prompt and every sampled token but the last, which
predicts nothing. With the paths in depth-first order, `lcp[i]`, the number of ids that path i shares with path
i - 1, describes the whole trie: path i adds the rows at depths lcp[i] .. length[i] - 1 and no others.

    path 0   q a b c          lcp 0      adds q a b c
    path 1   q a b d e        lcp 3      adds d e
    path 2   q f              lcp 1      adds f

Sorting puts paths with a shared prefix next to each other, in C. Python loops over calls, never over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from memopd.types import Call

Ints: TypeAlias = NDArray[np.int64]

_HEAD, _FEW = 16, 64  # ids and calls; they affect the speed, not the trie


@dataclass(frozen=True, slots=True)
class Trie:
    order: list[int]  # [N] the calls, depth first; siblings by their earliest call
    lcp: Ints  # [N] ids shared with the previous call; lcp[0] = 0
    length: Ints  # [N] rows on the call's path

    def select(self, places: Ints) -> Trie:
        """The trie of some of the calls. `places` are ascending indices into `order`."""
        order = [self.order[p] for p in places]
        lcp = np.zeros(len(places), np.int64)
        if len(places) > 1:  # two paths share the minimum over all neighbours between them
            lcp[1:] = np.minimum.reduceat(self.lcp[: places[-1] + 1], places[:-1] + 1)
        return Trie(order, lcp, self.length[places])


@dataclass(slots=True)
class Branch:
    """An inner node: all calls below it share their first `depth` ids."""

    depth: int
    first: int  # the earliest call below, as an index into the list of calls
    children: list[Branch | int] = field(default_factory=list)  # an int is a leaf: a place in depth-first order

    def add(self, child: Branch | int, first: int) -> None:
        self.children.append(child)
        self.first = min(self.first, first)


def build_trie(calls: Sequence[Call], keep: Sequence[int]) -> Trie:
    """The trie of `calls[i] for i in keep`."""
    order: list[int] = []
    shared: list[int] = []
    _sort_paths(calls, keep, _HEAD, b"", order, shared)
    places, lcp = _by_first_call(order, np.array(shared, np.int64))
    order = [order[p] for p in places]
    length = np.array([len(calls[i].prompt) + len(calls[i].completion) - 1 for i in order], np.int64)
    return Trie(order, lcp, length)


def _sort_paths(
    calls: Sequence[Call], which: Sequence[int], ids: int, before: bytes, order: list[int], shared: list[int]
) -> None:
    """Append the calls in the order of their paths, and how many ids each shares with the previous one.

    Sorts by the head of each path first, then within each group of equal heads. So most calls are compared only with
    calls of their own task, which are few enough to stay in a cache, and the input is never copied as a whole.
    """
    heads = _keys(calls, which, ids)
    for head, equal in groupby(sorted(which, key=heads.__getitem__), key=heads.__getitem__):
        group = list(equal)
        if len(group) > _FEW and len(head) == 4 * ids:
            _sort_paths(calls, group, 8 * ids, before, order, shared)
        else:
            keys, last = _keys(calls, group, None), before
            for i in sorted(group, key=keys.__getitem__):
                order.append(i)
                shared.append(_common_prefix(last, keys[i]))
                last = keys[i]
        before = head  # every later path differs from this group within its head


def _keys(calls: Sequence[Call], which: Sequence[int], ids: int | None) -> dict[int, bytes]:
    """Paths, or their first `ids`, as bytes. They are big-endian, so that memcmp orders them as the ids."""
    buffer = np.empty(ids or max(len(calls[i].prompt) + len(calls[i].completion) for i in which), ">u4")
    keys = {}
    for i in which:
        prompt = calls[i].prompt[:ids]
        completion = calls[i].completion[:-1][: len(buffer) - len(prompt)]
        length = len(prompt) + len(completion)
        buffer[: len(prompt)] = prompt
        buffer[len(prompt) : length] = completion
        keys[i] = buffer[:length].tobytes()
    return keys


def _common_prefix(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b)) // 4
    if n == 0:
        return 0
    differ = np.frombuffer(a, np.uint32, n) != np.frombuffer(b, np.uint32, n)
    first = int(differ.argmax())
    return first if differ[first] else n


def branches(calls: Sequence[int], lcp: Ints) -> Branch:
    """The root of the trie's inner nodes, built bottom up from adjacent common prefixes (an LCP-interval tree).

    `calls[i]` is the call at place i. A call that ends where others branch is a leaf child of that node.
    """
    never = max(calls) + 1
    stack = [Branch(0, never)]
    for place, call in enumerate(calls):
        _close(stack, int(lcp[place]), never)
        below = int(lcp[place + 1]) if place + 1 < len(calls) else 0
        if stack[-1].depth < below:  # the first leaf of a node that the next path branches off
            stack.append(Branch(below, never))
        stack[-1].add(place, call)
    _close(stack, 0, never)
    return stack[0]


def _close(stack: list[Branch], depth: int, never: int) -> None:
    """Close the open nodes that are deeper than `depth`, and leave a node of exactly that depth open."""
    while stack[-1].depth > depth:
        node = stack.pop()
        if stack[-1].depth < depth:
            stack.append(Branch(depth, never))
        stack[-1].add(node, node.first)


def _by_first_call(calls: Sequence[int], lcp: Ints) -> tuple[Ints, Ints]:
    """Reorder siblings by their earliest call, so that rows follow the order of the interaction."""
    places: list[int] = []
    shared: list[int] = []
    todo: list[tuple[Branch | int, int]] = [(branches(calls, lcp), 0)]
    while todo:
        node, depth = todo.pop()
        if isinstance(node, int):
            places.append(node)
            shared.append(depth)
            continue
        children = sorted(node.children, key=lambda c: calls[c] if isinstance(c, int) else c.first)
        # The first leaf under a node shares with its predecessor as much as the node does; the others share its depth.
        todo += [(child, node.depth) for child in reversed(children[1:])]
        todo.append((children[0], depth))
    return np.array(places, np.int64), np.array(shared, np.int64)
