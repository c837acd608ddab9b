"""The approaches of other trainers, for audits and ablations only: flattened history, corrupted rows, wrong masks.

Every function builds something wrong on purpose. MemOPD itself never trains on it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memopd.compile.pack import Decisions, Packed
from memopd.types import Call, Episode, Ids


def persistent_history(episode: Episode) -> Packed:
    """The interaction as one growing text: q, x_0, a_0, o_0, a_1, o_1, ... with running positions, causal.

    The segments of a prompt tell which part is the new observation. Without recorded segments, it is the part after
    q and after the longest piece that was retained from earlier calls (see `observation`).
    """
    q = stable_prefix(episode)
    pieces = [episode.calls[0].prompt]
    rows, calls = [], []
    length = len(pieces[0])
    for t, call in enumerate(episode.calls):
        if t > 0:
            new = observation(call, np.concatenate(pieces)[q:], episode.calls[t - 1].completion, q)
            pieces.append(new)
            length += len(new)
        if call.trainable:
            rows.append(np.arange(length - 1, length - 1 + len(call.completion), dtype=np.int32))
            calls.append(t)
        pieces.append(call.completion)
        length += len(call.completion)
    tokens = np.concatenate(pieces)[:-1]
    decisions = Decisions(
        row=np.concatenate(rows),
        token=np.concatenate([episode.calls[t].completion for t in calls]),
        call=np.repeat(np.array(calls, np.int32), [len(r) for r in rows]),
    )
    T = len(tokens)
    return Packed(tokens, np.arange(T, dtype=np.int32), np.full(T, T, np.int32), decisions)


def stable_prefix(episode: Episode) -> int:
    """|q|: the recorded prefix segment, or else the ids that all prompts of the episode start with."""
    for segment in episode.calls[0].segments:
        if segment.kind == "prefix":
            return segment.stop
    first = episode.calls[0].prompt
    return min(_common_prefix(first, call.prompt) for call in episode.calls)


def observation(call: Call, history: Ids, last: Ids, q: int) -> Ids:
    """o_{t-1}: the part of z_t that was never in a context before.

    Without segments beyond the prefix: drop q, then the longest beginning of x_t that is the history so far
    (append-only rules), the last response (MEM1) or a suffix of it (suffix retention). The rest counts as new.
    """
    if any(s.kind != "prefix" for s in call.segments):
        new = [call.prompt[s.start : s.stop] for s in call.segments if s.kind == "observation"]
        return np.concatenate([*new, call.prompt[:0]])
    x = call.prompt[q:]
    retained = max(_common_prefix(x, history), _common_prefix(x, last), _suffix_prefix(last, x))
    return x[retained:]


def corrupt(packed: Packed, visibility: bool = False, positions: bool = False) -> Packed:
    """Exact rows in a wrong state: they see all earlier rows of their tree, or have running positions, or both."""
    start, stop = _trees(packed)
    return replace(
        packed,
        exit=stop.astype(np.int32) if visibility else packed.exit,
        positions=(np.arange(len(packed)) - start).astype(np.int32) if positions else packed.positions,
    )


def trajectory_mask(history: Packed, q: int) -> NDArray[np.bool_]:
    """Rows of a persistent history that predict any token after q, so that observations count as decisions."""
    return np.arange(len(history)) >= q - 1


def response_mask(call: Call, q: int) -> NDArray[np.bool_]:
    """Rows of one call that predict any token of the assistant turn, x_t and a_t alike.

    The mutable context is part of the assistant turn, so retained memory counts as sampled once more.
    """
    return np.arange(len(call.prompt) + len(call.completion) - 1) >= q - 1


def _trees(packed: Packed) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every row, the first row of its tree and the first row after it."""
    roots = [0]
    while (next_root := int(packed.exit[roots[-1]])) < len(packed):
        roots.append(next_root)
    bounds = np.array([*roots, len(packed)], np.int64)
    sizes = np.diff(bounds)
    return np.repeat(bounds[:-1], sizes), np.repeat(bounds[1:], sizes)


def _common_prefix(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _suffix_prefix(a: Ids, b: Ids) -> int:
    """The longest n with a[-n:] == b[:n]."""
    for n in range(min(len(a), len(b)), 0, -1):
        if a[-n] == b[0] and np.array_equal(a[-n:], b[:n]):
            return n
    return 0
