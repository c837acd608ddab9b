"""Context-update rules U select the part of the interaction so far that the next call reads, after q.

A rule turns the turns so far into pieces of token ids. Retained responses are slices of the ids as sampled, and an
observation is encoded once. Only `summary` and `refresh`, by their definition, encode text again.

A rule may also call the model for itself, for example to write a note. Its `context` is then a generator: it yields an
`Ask`, gets the `Reply`, and returns the pieces. The agent makes these calls beside those of other episodes and
records each of them. A later update finds the replies in the turns (`Turn.replies`), so that a rule needs no state.

Your own rule is one class with `context`, which you name as `module:name`; `parts.py` resolves the name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from memopd.agent.codec import Codec
from memopd.agent.protocol import summary_of
from memopd.names import build, parameters, resolve
from memopd.types import Ids, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A span of the next context, and its origin."""

    ids: Ids
    kind: str  # "memory" (retained) or "observation" (new)
    source: int  # the call: Turn.call or Reply.call


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A model call that a memory rule makes for itself. It has the sampling parameters of the agent's own calls.

    >>> Ask("Note what matters in: the Velm is 90 km long", purpose="note", stop=("\\n",), max_tokens=64).trainable
    True
    """

    prompt: str | Ids | Sequence[Piece]  # the text of a user turn, or token ids, or pieces that follow q
    purpose: str = "memory"  # recorded with the call
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # the agent's own limit applies too
    trainable: bool = True  # False: nothing is learnt from the call

    def __post_init__(self) -> None:
        if not self.purpose:
            raise ValueError("Ask.purpose must not be empty: calls without a purpose are the agent's actions")
        if not (isinstance(self.prompt, str | np.ndarray) or all(isinstance(piece, Piece) for piece in self.prompt)):
            raise ValueError("Ask.prompt must be text, a NumPy array of token ids, or pieces")


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The model's answer to an `Ask`."""

    ids: Ids  # as sampled
    text: str
    purpose: str
    call: int  # its number in the episode: the source of a piece that retains it


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One action, the observation after it, and the model's replies to the memory rule after that."""

    response: Ids  # a_t, as sampled
    observation: Ids  # o_t, encoded once
    call: int  # the number of the action among the calls of the episode: the source of its pieces
    replies: tuple[Reply, ...] = ()
    room: int | None = None  # the most tokens that the next prompt can have after q; None: no limit


Update: TypeAlias = Generator[Ask, Reply, Sequence[Piece]]


class Memory(Protocol):
    def context(self, turns: Sequence[Turn]) -> Sequence[Piece] | Update:
        """x_{t+1} from the turns 0..t. It must not be empty."""
        ...

    # def query(self, response: str, keywords: str) -> str
    #     Optional: the query for retrieval when the agent's response searches for `keywords`. Default: `keywords`.


class Mem1:
    """The whole last response, then the new observation."""

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return [_response(turns[-1]), _observation(turns)]


class FullResponse:
    """All turns so far: the append-only history of most agents."""

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return _history(turns)


@dataclass(frozen=True, slots=True)
class Suffix:
    """The last `size` tokens of the last response, then the new observation."""

    size: int = 64

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        last = _response(turns[-1])
        return [Piece(last.ids[-self.size :], last.kind, last.source), _observation(turns)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Only the summary of the last response, encoded again, then the new observation."""

    codec: Codec

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        text = summary_of(self.codec.decode(turns[-1].response))
        ids = self.codec.encode(f"<think>{text}</think>")
        return [Piece(ids, "memory", turns[-1].call), _observation(turns)]


@dataclass(frozen=True, slots=True)
class Window:
    """The last `size` responses and observations."""

    size: int = 2

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return _history(turns[-self.size :])


@dataclass(frozen=True, slots=True)
class Refresh:
    """The summary, then new evidence, retrieved for that summary, in place of the old evidence."""

    codec: Codec

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        return Summary(self.codec).context(turns)

    def query(self, response: str, keywords: str) -> str:
        # The summary alone may not contain what the agent searches for next, so the agent's keywords come first.
        return f"{keywords} {summary_of(response)}".strip()


@dataclass(frozen=True, slots=True)
class Truncate:
    """The append-only history without its oldest tokens: at most `size` tokens."""

    size: int = 1024

    def context(self, turns: Sequence[Turn]) -> list[Piece]:
        pieces = _history(turns)
        over = sum(len(p.ids) for p in pieces) - self.size
        kept = []
        for piece in pieces:
            cut = min(max(over, 0), len(piece.ids))
            over -= cut
            if cut < len(piece.ids):
                kept.append(Piece(piece.ids[cut:], piece.kind, piece.source))
        return kept


MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # A-MEM's embedding model


def amem(codec: Codec, tokenizer: Any, size: int = 3, embedder: str = MINILM) -> Memory:
    """A-MEM's notes. `size` is the number of notes that MEM1 takes when it evaluates A-MEM."""
    from memopd.agent.amem import AMem  # it is made of the parts above

    return AMem(codec, tokenizer, size, embedder)


RULES: dict[str, Callable[..., Memory]] = {
    "mem1": Mem1,
    "full_response": FullResponse,
    "suffix": Suffix,
    "summary": Summary,
    "window": Window,
    "refresh": Refresh,
    "truncate": Truncate,
    "amem": amem,
}


def named_rule(setting: str, name: str) -> tuple[Callable[..., Memory], dict[str, Any]]:
    """The class of a name, and the arguments in it: a size as in `window:3` or `my_module:LastFew:3`, and for `amem` an
    embedding model as well, as in `amem:3:FOLDER` or `amem:FOLDER`."""
    given: dict[str, Any] = {}
    rule, _, arguments = name.partition(":")
    if rule in RULES and "embedder" in parameters(RULES[rule]):
        first, _, rest = arguments.partition(":")
        size, model = (first, rest) if first.isdecimal() else ("", arguments)
        name, given = f"{rule}:{size}" if size else rule, {"embedder": model} if model else {}
    rule, colon, size = name.rpartition(":")
    if not colon or (rule not in RULES and not size.isdecimal()):
        return resolve(setting, name, RULES, ("context",)), given
    part = resolve(setting, rule, RULES, ("context",))
    if "size" not in parameters(part):
        raise ValueError(f"{setting}: the memory rule {rule!r} takes no size, got {name!r}")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"{setting}: the size of a memory rule is 1 or more, as in {rule}:3, got {name!r}")
    return part, {"size": int(size), **given}


def memory_rule(name: str, codec: Codec) -> Memory:
    """The rule called `name`, for programs without a configuration."""
    part, size = named_rule("memory", name)
    rule: Memory = build("memory", name, part, {"codec": codec, **size})
    return rule


def assemble(prefix: Ids, pieces: Sequence[Piece]) -> tuple[Ids, tuple[Segment, ...]]:
    """z_t = [q, x_t], and the spans of its parts."""
    segments, at = [Segment("prefix", 0, len(prefix))], len(prefix)
    for piece in pieces:
        segments.append(Segment(piece.kind, at, at + len(piece.ids), piece.source))
        at += len(piece.ids)
    return np.concatenate([prefix, *(p.ids for p in pieces)]).astype(np.int32), tuple(segments)


def _response(turn: Turn) -> Piece:
    return Piece(turn.response, "memory", turn.call)


def _observation(turns: Sequence[Turn]) -> Piece:
    return Piece(turns[-1].observation, "observation", turns[-1].call)


def _history(turns: Sequence[Turn]) -> list[Piece]:
    """Responses and observations in order. Only the last observation is new; earlier ones count as memory."""
    pieces = []
    for turn in turns:
        pieces.append(_response(turn))
        pieces.append(Piece(turn.observation, "memory", turn.call))
    return [*pieces[:-1], _observation(turns)]
