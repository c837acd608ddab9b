"""For each call of an episode: what it read, what had been dropped, and what a flattened history would contain instead.

The flattened history q, x_0, a_0, o_0, a_1, ... contains every id that the agent ever read or wrote, so nearly every
piece of every context is a span of it. Only text that a memory rule encoded itself (a summary) has ids of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from memopd.compile.controls import persistent_history, stable_prefix
from memopd.report.pool import Pool
from memopd.types import Call, Episode, Ids

Span: TypeAlias = tuple[str, int | None, int, int]  # kind, source, start, stop
ABSENT = -2  # no position, and not the predecessor of one


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a context. 80 ids of call 1's response, at 312 in this call and at 430 in the flattened history, are

    Piece("memory", 1, ids, flat=430, at=312)
    """

    kind: str  # prefix, memory, observation, response (a call's completion), or context (unknown)
    source: int | None  # the call that it came from
    ids: Ids
    flat: int | None  # its position in the flattened history, if it occurs there
    at: int | None  # its position in this call's prompt, if it occurs there


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The flattened interaction, including the last response."""

    ids: Ids
    begin: tuple[int, ...]  # of each call's response; the call would have read everything before it
    pieces: tuple[Piece, ...]  # the first prompt, then responses and observations in turn


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One call."""

    read: tuple[Piece, ...]  # z_t
    dropped: tuple[Piece, ...]  # read or written by the call before, but not read by this one
    flattened: tuple[Piece, ...]  # what a flattened history has in the place of z_t
    same: int  # ids of z_t that have the same position there
    moved: int  # ids of z_t that have another position there
    before: tuple[tuple[int, int], ...]  # start and stop of what an earlier call read or wrote, in z_t


def flatten(episode: Episode) -> History:
    """Flatten an episode, with all its calls, whether they are trained on or not."""
    calls = [replace(c, trainable=True, stop=None) for c in episode.calls]
    packed = persistent_history(replace(episode, calls=tuple(calls)))
    ids = np.append(packed.tokens, calls[-1].completion[-1])  # the packed form has no row for the last token
    begin = [int(packed.decisions.row[np.searchsorted(packed.decisions.call, t)]) + 1 for t in range(len(calls))]
    q = stable_prefix(episode)
    spans: list[Span] = [("prefix", None, 0, q), ("context", None, q, begin[0])]
    for t, call in enumerate(calls):
        end = begin[t] + len(call.completion)
        spans.append(("response", t, begin[t], end))
        spans.append(("observation", t, end, begin[t + 1] if t + 1 < len(calls) else end))
    pieces = [Piece(kind, source, ids[a:b], a, None) for kind, source, a, b in spans if a < b]
    return History(ids, tuple(begin), tuple(pieces))


def contexts(episode: Episode) -> tuple[History, list[Context]]:
    history = flatten(episode)
    read = [tuple(_read(episode, t, history)) for t in range(len(episode.calls))]
    before = unchanged(episode)
    return history, [_context(episode, t, history, read, before[t]) for t in range(len(read))]


def unchanged(episode: Episode) -> list[tuple[tuple[int, int], ...]]:
    """The spans of each prompt that an earlier call read or wrote, so that a reader of the calls has seen them.

    Ids count, not positions: memory that moved up is unchanged. Spans of fewer than `pool.LEAST` ids count as new.
    """
    pool, found = Pool(), []
    for call in episode.calls:
        spans: list[tuple[int, int]] = []
        at = 0
        for part in pool.add(call.prompt):
            if part.known and spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + part.n)
            elif part.known:
                spans.append((at, at + part.n))
            at += part.n
        pool.add(call.completion)
        found.append(tuple(spans))
    return found


def _read(episode: Episode, t: int, history: History) -> Iterator[Piece]:
    for kind, source, start, stop in _spans(episode, t, history):
        ids = episode.calls[t].prompt[start:stop]
        yield Piece(kind, source, ids, _locate(ids, start, source, t, history), start)


def _spans(episode: Episode, t: int, history: History) -> list[Span]:
    """The spans of a prompt. Without recorded segments, they follow from what the flattened history counts as new."""
    call = episode.calls[t]
    if t == 0 or any(s.kind != "prefix" for s in call.segments):
        return _gapless(call)
    q = min(stable_prefix(episode), len(call.prompt))
    new = history.begin[t] - history.begin[t - 1] - len(episode.calls[t - 1].completion)
    old = max(q, len(call.prompt) - new)
    spans: list[Span] = [
        ("prefix", None, 0, q),
        ("memory", None, q, old),
        ("observation", t - 1, old, len(call.prompt)),
    ]
    return [s for s in spans if s[2] < s[3]]


def _gapless(call: Call) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for s in sorted(call.segments, key=lambda s: s.start):
        spans += [("context", None, at, s.start), (s.kind, s.source, max(at, s.start), s.stop)]
        at = max(at, s.stop)
    return [s for s in [*spans, ("context", None, at, len(call.prompt))] if s[2] < s[3]]


def _locate(ids: Ids, start: int, source: int | None, t: int, history: History) -> int | None:
    """The position of these ids in the history before call t: in the turn that they came from, or else the last one."""
    if start == 0 and np.array_equal(history.ids[: len(ids)], ids):
        return 0
    if source is not None and source < t:
        turn = history.begin[source]
        if (found := _find(ids, history.ids[turn : history.begin[source + 1]])) is not None:
            return turn + found
    return _find(ids, history.ids[: history.begin[t]], last=True)


def _find(ids: Ids, within: Ids, last: bool = False) -> int | None:
    size, text, wanted = ids.itemsize, np.ascontiguousarray(within).tobytes(), np.ascontiguousarray(ids).tobytes()
    at = text.rfind(wanted) if last else text.find(wanted)
    while at >= 0 and at % size:  # a match of bytes that begins inside an id
        at = text.rfind(wanted, 0, at + len(wanted) - 1) if last else text.find(wanted, at + 1)
    return at // size if at >= 0 else None


def _context(
    episode: Episode, t: int, history: History, read: list[tuple[Piece, ...]], before: tuple[tuple[int, int], ...]
) -> Context:
    position = np.full(len(history.ids), ABSENT, np.int64)  # in z_t, of every id of the history
    for piece in read[t]:
        if piece.flat is not None and piece.at is not None:
            position[piece.flat : piece.flat + len(piece.ids)] = piece.at + np.arange(len(piece.ids))
    past = position[: history.begin[t]]
    earlier = [p for p in history.pieces if p.flat is not None and p.flat < len(past)]
    flattened = [part for piece in earlier for part in _cut(piece, position)]
    dropped = []
    if t > 0:
        written = Piece("response", t - 1, episode.calls[t - 1].completion, history.begin[t - 1], None)
        for piece in (*read[t - 1], written):
            if piece.flat is not None:
                dropped += [p for p in _cut(piece, position) if p.at is None]
            elif not any(np.array_equal(piece.ids, kept.ids) for kept in read[t]):
                dropped.append(replace(piece, at=None))
    same = int((past == np.arange(len(past))).sum())
    return Context(read[t], tuple(dropped), tuple(flattened), same, int((past >= 0).sum()) - same, before)


def _cut(piece: Piece, position: NDArray[np.int64]) -> Iterator[Piece]:
    """Split a piece into parts that are contiguous in the prompt, or that are not in it."""
    assert piece.flat is not None
    at = position[piece.flat : piece.flat + len(piece.ids)]
    apart = np.diff(at) != (at[1:] >= 0)  # a run counts up by one, or stays ABSENT
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(at)]
    for a, b in pairwise(bounds):
        yield Piece(piece.kind, piece.source, piece.ids[a:b], piece.flat + a, int(at[a]) if at[a] >= 0 else None)
