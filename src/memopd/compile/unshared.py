"""The same calls without sharing: right states, every prefix computed again. What packing is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memopd.compile.pack import Decisions, Packed, compile_calls
from memopd.types import Call


def unshared(calls: Sequence[Call], budget: int) -> list[Packed]:
    """Every trainable call in rows of its own, in packs of at most `budget` rows, in the order given."""
    packs: list[Packed] = []
    members: list[int] = []
    group: list[Packed] = []
    for i, call in enumerate(calls):
        if not call.trainable:
            continue
        alone = compile_calls([call])
        if group and sum(map(len, group)) + len(alone) > budget:
            packs.append(side_by_side(group, [[m] for m in members]))
            group, members = [], []
        group.append(alone)
        members.append(i)
    return [*packs, side_by_side(group, [[m] for m in members])]


def side_by_side(packs: Sequence[Packed], members: Sequence[Sequence[int]]) -> Packed:
    """Packs as separate trees of one, `members[i]` being the calls of pack i."""
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
