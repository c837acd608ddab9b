"""Checks that packs contain exactly the calls. It compares integers without a model, so it needs no tolerance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memopd.compile import Packed
from memopd.types import Call


def structural_problems(packs: Sequence[Packed], calls: Sequence[Call]) -> list[str]:
    """The errors in the packs, one line each; empty if every call is rebuilt token by token.

    Each call has one decision per sampled token, on the row before that token on the call's own path. The path is the
    prompt and the sampled tokens, at positions 0, 1, 2, ...
    """
    problems = []
    seen = {i: 0 for i, call in enumerate(calls) if call.trainable}
    for n, packed in enumerate(packs):
        if problem := _pack_problem(packed):
            problems.append(f"pack {n}: {problem}")
            continue
        for i in np.unique(packed.decisions.call).tolist():
            if i not in seen:
                problems.append(f"call {i}: has decisions but is not a trainable call")
                continue
            seen[i] += 1
            if problem := _call_problem(packed, calls[i], i):
                problems.append(f"call {i}: {problem}")
    problems += [f"call {i}: in {n} packs instead of one" for i, n in seen.items() if n != 1]
    return problems


def _pack_problem(packed: Packed) -> str | None:
    """Finds rows that see too much or too little, independently of their calls."""
    T, row = len(packed), packed.decisions.row
    if not ((packed.exit > np.arange(T)) & (packed.exit <= T)).all():
        return "an exit is not after its own row and within the pack"
    if len(row) and not (row.min() >= 0 and row.max() < T):
        return "a decision is on a row that does not exist"
    # Row q sees the rows up to itself, without those that exited before it. Their number must match its position.
    sees = np.arange(1, T + 1) - np.cumsum(np.bincount(packed.exit, minlength=T + 1))[:T]
    if len(wrong := np.flatnonzero(sees != packed.positions + 1)):
        return f"row {wrong[0]} at position {packed.positions[wrong[0]]} sees {sees[wrong[0]]} rows"
    return None


def _call_problem(packed: Packed, call: Call, i: int) -> str | None:
    mine = packed.decisions.call == i
    rows, tokens = packed.decisions.row[mine], packed.decisions.token[mine]
    if len(tokens) != len(call.completion):
        return f"{len(tokens)} decisions for {len(call.completion)} sampled tokens"
    if not np.array_equal(tokens, call.completion):
        return "its decisions are not the tokens that were sampled"
    expected = call.path
    path = packed.path(int(rows[-1]))
    if not np.array_equal(packed.tokens[path], expected):
        return f"its last decision sees {len(path)} rows that are not its {len(expected)} tokens"
    if not np.array_equal(packed.positions[path], np.arange(len(path))):
        return "its positions are not 0, 1, 2, ..."
    if not np.array_equal(path[len(call.prompt) - 1 :], rows):
        return "a decision is not on the row before its token"
    return None
