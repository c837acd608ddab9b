"""Context-update rules U: what of the interaction so far the next call reads, after q.

A rule turns the turns so far into pieces of token ids. Retained responses are slices of the ids as sampled; an
observation is encoded once; only `summary` and `refresh`, by their definition, encode text again. A new rule is one
class and one entry in RULES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memopd.agent.protocol import summary_of
from memopd.types import Ids, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call and what its action brought."""

    response: Ids  # a_t, as sampled
    observation: Ids  # o_t, encoded once


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A stretch of the next context, and where it came from."""

    ids: Ids
    kind: str  # "memory" (retained) or "observation" (new)
    source: int  # the call


@dataclass(frozen=True, slots=True)
class Codec:
    """Text to ids and back, for the rules that rewrite text."""

    encode: Callable[[str], Ids]
    decode: Callable[[Ids], str]


class Memory(Protocol):
    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        """x_{t+1} from the turns 0..t, never empty."""
        ...

    def query(self, response: str, keywords: str) -> str:
        """What to retrieve when the agent's response asks for `keywords`."""
        ...


class _Rule:
    """Most rules retrieve what the agent asks for."""

    def query(self, response: str, keywords: str) -> str:
        return keywords


class Mem1(_Rule):
    """The whole last response, then the new information."""

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return [_said(turns, -1), _new(turns)]


class FullResponse(_Rule):
    """Everything so far: the append-only history of most agents."""

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return _history(turns)


@dataclass(frozen=True, slots=True)
class Suffix(_Rule):
    """The last n tokens of the last response, then the new information."""

    n: int = 64

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        said = _said(turns, -1)
        return [Piece(said.ids[-self.n :], said.kind, said.source), _new(turns)]


@dataclass(frozen=True, slots=True)
class Summary(_Rule):
    """Only the summary of the last response, encoded again, then the new information."""

    codec: Codec

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        text = summary_of(self.codec.decode(turns[-1].response))
        ids = self.codec.encode(f"<think>{text}</think>")
        return [Piece(ids, "memory", len(turns) - 1), _new(turns)]


@dataclass(frozen=True, slots=True)
class Window(_Rule):
    """The last w responses and informations."""

    w: int = 2

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return _history(turns, since=max(0, len(turns) - self.w))


@dataclass(frozen=True, slots=True)
class Refresh(_Rule):
    """The summary, then evidence retrieved anew for it, in place of the old evidence."""

    codec: Codec

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return Summary(self.codec).context(turns)

    def query(self, response: str, keywords: str) -> str:
        # The summary alone need not say what is looked for next: the agent's keywords stay in front.
        return f"{keywords} {summary_of(response)}".strip()


@dataclass(frozen=True, slots=True)
class Truncate(_Rule):
    """Append, and drop the oldest tokens over a limit."""

    limit: int = 1024

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        pieces = _history(turns)
        over = sum(len(p.ids) for p in pieces) - self.limit
        kept = []
        for piece in pieces:
            cut = min(max(over, 0), len(piece.ids))
            over -= cut
            if cut < len(piece.ids):
                kept.append(Piece(piece.ids[cut:], piece.kind, piece.source))
        return kept


RULES: dict[str, Callable[[Codec], Memory]] = {
    "mem1": lambda codec: Mem1(),
    "full_response": lambda codec: FullResponse(),
    "suffix": lambda codec: Suffix(),
    "summary": Summary,
    "window": lambda codec: Window(),
    "refresh": Refresh,
    "truncate": lambda codec: Truncate(),
}


def memory_rule(name: str, codec: Codec) -> Memory:
    """`name`, or `name:n` for the rules that have a size: `window:3`, `suffix:128`, `truncate:2048`."""
    rule, _, size = name.partition(":")
    if rule not in RULES:
        raise ValueError(f"unknown memory rule {rule!r}: choose from {', '.join(RULES)}")
    if not size:
        return RULES[rule](codec)
    sized: dict[str, Callable[[int], Memory]] = {"suffix": Suffix, "window": Window, "truncate": Truncate}
    if rule not in sized or not size.isdecimal() or int(size) < 1:
        raise ValueError(f"memory rule {name!r}: only {', '.join(sized)} take a size, 1 or more, as in window:3")
    return sized[rule](int(size))


def assemble(prefix: Ids, pieces: Sequence[Piece]) -> tuple[Ids, tuple[Segment, ...]]:
    """z_t = [q, x_t] with the spans of its parts."""
    segments, at = [Segment("prefix", 0, len(prefix))], len(prefix)
    for piece in pieces:
        segments.append(Segment(piece.kind, at, at + len(piece.ids), piece.source))
        at += len(piece.ids)
    return np.concatenate([prefix, *(p.ids for p in pieces)]).astype(np.int32), tuple(segments)


def _said(turns: Sequence[Turn], t: int) -> Piece:
    t %= len(turns)
    return Piece(turns[t].response, "memory", t)


def _new(turns: Sequence[Turn]) -> Piece:
    return Piece(turns[-1].observation, "observation", len(turns) - 1)


def _history(turns: Sequence[Turn], since: int = 0) -> list[Piece]:
    """Responses and observations in order. An observation is new once; afterwards it is memory."""
    pieces = []
    for t in range(since, len(turns)):
        pieces.append(_said(turns, t))
        pieces.append(Piece(turns[t].observation, "memory", t))
    return [*pieces[:-1], _new(turns)]
