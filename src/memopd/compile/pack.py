"""Turns calls into packed rows: every provably equal prefix appears once, as three integers per row.

    row q sees row k  ⟺  k <= q < exit[k]

For the calls [7 8 | 1 2] and [7 8 9 | 3] (prompt | completion), where 2 and 3 need no row:

    row        0  1  2  3
    tokens     7  8  1  9
    positions  0  1  2  2
    exit       4  4  3  4       row 3 (id 9) sees rows 0, 1, 3: its own call and nothing else
    decisions  (row 1, token 1, call 0)  (row 2, token 2, call 0)  (row 3, token 3, call 1)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd.compile.trie import Branch, Ints, Trie, branches, build_trie
from memopd.types import Call, Ids


@dataclass(frozen=True, slots=True)
class Decisions:
    """The sampled action domain m^act: one entry per sampled token, in the order of the calls."""

    row: Ids  # [D] g(t, k): the row whose logits predict the token
    token: Ids  # [D] the sampled token
    call: Ids  # [D] its call, an index into the list of calls that you passed

    def __len__(self) -> int:
        return len(self.row)


class Plans:
    """What attention kernels prepared for the rows of a pack, kept with it (`attention.make_plan`).

    No dict, because FSDP copies the containers in the arguments of a model, and would lose what is added later.
    """

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class Packed:
    """One physical sequence that holds many calls."""

    tokens: Ids  # [T] the id in row r
    positions: Ids  # [T] its position in its own call
    exit: Ids  # [T] the first row after r's subtree
    decisions: Decisions
    plans: Plans = field(repr=False, compare=False, default_factory=Plans)

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, row: int) -> Ints:
        """The rows that `row` sees, itself last."""
        return np.flatnonzero(self.exit[: row + 1] > row)


def compile_calls(calls: Sequence[Call]) -> Packed:
    """All trainable calls in one pack. Other calls get no rows, because nothing is learnt from them."""
    trie = build_trie(calls, _trainable(calls))
    return _lay_out(calls, trie)


def fill(calls: Sequence[Call], budget: int) -> list[Packed]:
    """Packs of at most `budget` rows, best fit. Subtrees stay together, so that no shared prefix is split.

    No call is ever cut: a call that is longer than the budget raises an error that names it.
    """
    trie = build_trie(calls, _trainable(calls))
    if (longest := int(trie.length.max())) > budget:
        call = trie.order[int(trie.length.argmax())]
        name = "" if calls[call].name == "call" else f" ({calls[call].name})"
        raise ValueError(
            f"call {call} of {len(calls)}{name} needs {longest} rows and the budget is {budget}: "
            "raise the budget or leave the episode out"
        )
    bins = _fill_branch(branches(trie.order, trie.lcp), trie.length, budget)
    places = sorted(sorted(_leaves(b)) for b in bins)  # in the order of the interaction
    return [_lay_out(calls, trie.select(np.array(p, np.int64))) for p in places]


def _trainable(calls: Sequence[Call]) -> list[int]:
    keep = [i for i, call in enumerate(calls) if call.trainable]
    if not keep:
        raise ValueError("there is no trainable call to compile")
    return keep


def _lay_out(calls: Sequence[Call], trie: Trie) -> Packed:
    start = np.concatenate([[0], np.cumsum(trie.length - trie.lcp)])  # [N + 1] first new row of each path, then T
    tokens = np.empty(start[-1], np.int32)
    positions = np.empty(start[-1], np.int32)
    depths = np.arange(trie.length.max(), dtype=np.int32)
    for i, lcp, length, at in zip(trie.order, *_lists(trie, start), strict=True):
        prompt, completion = calls[i].prompt, calls[i].completion[:-1]
        end = at + length - lcp
        middle = at + max(len(prompt) - lcp, 0)
        tokens[at:middle] = prompt[lcp:]
        tokens[middle:end] = completion[max(lcp - len(prompt), 0) :]
        positions[at:end] = depths[lcp:length]
    return Packed(tokens, positions, _exits(trie, start), _decisions(calls, trie, start))


def _lists(trie: Trie, start: Ints) -> tuple[list[int], list[int], list[int]]:
    """Per path: shared ids, length, first new row. As plain integers, because Python loops over these faster."""
    return trie.lcp.tolist(), trie.length.tolist(), start[:-1].tolist()


def _exits(trie: Trie, start: Ints) -> Ids:
    """Row r at depth d exits at the first later path that shares at most d ids with the path before it.

    The loop goes from the last path to the first. `stack` holds the candidates: later paths, the nearest on top, each
    of which shares fewer ids than those above it. A path's rows split into one run per candidate; the deepest rows
    belong to the nearest one.
    """
    lengths: list[int] = []  # of the runs, from the last row to the first
    exits: list[int] = []
    stack: list[tuple[int, int]] = [(0, int(start[-1]))]
    for lcp, deepest, at in reversed(list(zip(*_lists(trie, start), strict=True))):
        depth = deepest
        for shared, exit in reversed(stack):
            if depth <= lcp:
                break
            top = max(shared, lcp)
            if top < depth:
                lengths.append(depth - top)
                exits.append(exit)
                depth = top
        while stack and stack[-1][0] >= lcp:
            stack.pop()
        stack.append((lcp, at))
    return np.repeat(np.array(exits[::-1], np.int32), lengths[::-1])


def _decisions(calls: Sequence[Call], trie: Trie, start: Ints) -> Decisions:
    """The row g(t, k) of every sampled token. `runs` maps the depths of the current path to its rows."""
    by_call = sorted(trie.order)
    sizes = [len(calls[i].completion) for i in by_call]
    slot = dict(zip(by_call, np.cumsum([0, *sizes]).tolist(), strict=False))  # first decision of each call
    row = np.empty(sum(sizes), np.int32)
    runs: list[tuple[int, int]] = []  # (depth, row at that depth minus depth), shallowest first
    for i, lcp, length, at in zip(trie.order, *_lists(trie, start), strict=True):
        while runs and runs[-1][0] >= lcp:
            runs.pop()
        if length > lcp:
            runs.append((lcp, at - lcp))
        first, stop = len(calls[i].prompt) - 1, length
        to = slot[i] - first  # the decision at depth d is number d + to
        for depth, offset in reversed(runs):
            lo = max(depth, first)
            if lo < stop:
                row[lo + to : stop + to] = np.arange(lo + offset, stop + offset)
                stop = lo
            if depth <= first:
                break
    return Decisions(
        row=row,
        token=np.concatenate([calls[i].completion for i in by_call]),
        call=np.repeat(np.array(by_call, np.int32), sizes),
    )


# ---- the same calls without sharing ------------------------------------------------------------------------


def unshared(calls: Sequence[Call], budget: int) -> list[Packed]:
    """Every trainable call in rows of its own, in the order given: exact states, every prefix computed again.

    This is the baseline for packing. A pack has at most `budget` rows; a longer call gets a pack of its own.
    """
    packs: list[Packed] = []
    members: list[int] = []
    group: list[Packed] = []
    for i in _trainable(calls):
        alone = compile_calls([calls[i]])
        if group and sum(map(len, group)) + len(alone) > budget:
            packs.append(side_by_side(group, [[m] for m in members]))
            group, members = [], []
        group.append(alone)
        members.append(i)
    return [*packs, side_by_side(group, [[m] for m in members])]


def side_by_side(packs: Sequence[Packed], members: Sequence[Sequence[int]]) -> Packed:
    """Several packs as separate trees of one pack. `members[i]` are the calls of pack i."""
    start = np.cumsum([0] + [len(p) for p in packs])
    row = np.concatenate([p.decisions.row + s for p, s in zip(packs, start, strict=False)])
    call = np.concatenate([np.array(m)[p.decisions.call] for p, m in zip(packs, members, strict=True)])
    token = np.concatenate([p.decisions.token for p in packs])
    order = np.argsort(call, kind="stable")
    return Packed(
        np.concatenate([p.tokens for p in packs]),
        np.concatenate([p.positions for p in packs]),
        np.concatenate([p.exit + s for p, s in zip(packs, start, strict=False)]).astype(np.int32),
        Decisions(row[order].astype(np.int32), token[order], call[order].astype(np.int32)),
    )


# ---- budgets ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bin:
    rows: int  # including the shared prefix
    content: list[_Bin | int]


def _fill_branch(root: Branch, length: Ints, budget: int) -> list[_Bin]:
    """Works bottom up: a subtree that fits is one piece; one that does not fit becomes several well-filled bins."""
    done: dict[int, list[_Bin]] = {}
    todo: list[tuple[Branch, bool]] = [(root, False)]  # not recursive: append-only episodes are deep
    while todo:
        node, children_done = todo.pop()
        if not children_done:
            todo.append((node, True))
            todo += [(child, False) for child in node.children if isinstance(child, Branch)]
            continue
        pieces: list[_Bin] = []
        for child in node.children:
            pieces += [_Bin(int(length[child]), [child])] if isinstance(child, int) else done.pop(id(child))
        done[id(node)] = _best_fit(pieces, node.depth, budget)
    return done[id(root)]


def _best_fit(pieces: list[_Bin], shared: int, budget: int) -> list[_Bin]:
    """Best fit decreasing. The pieces in one bin share their first `shared` rows."""
    bins: list[tuple[int, int, _Bin]] = []  # (rows left, age, bin), ascending
    for age, piece in enumerate(sorted(pieces, key=lambda p: -p.rows)):
        extra = piece.rows - shared
        at = bisect_left(bins, extra, key=lambda b: b[0])
        if at == len(bins):
            into = _Bin(shared, [])
            left, age_of_bin = budget - shared, age
        else:
            left, age_of_bin, into = bins.pop(at)
        into.rows += extra
        into.content.append(piece)
        insort(bins, (left - extra, age_of_bin, into), key=lambda b: b[:2])
    return [b for _, _, b in bins]


def _leaves(root: _Bin) -> list[int]:
    leaves: list[int] = []
    todo: list[_Bin | int] = [root]
    while todo:
        item = todo.pop()
        if isinstance(item, int):
            leaves.append(item)
        else:
            todo += item.content
    return leaves
