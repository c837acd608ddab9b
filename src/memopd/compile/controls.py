"""The approaches of other trainers, for audits and ablations only: flattened or split histories, corrupted rows, masks.

MemOPD itself never trains on any of them. Each costs something: a wrong state, tokens without a gradient, or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memopd.compile.pack import Decisions, Packed
from memopd.types import Call, Episode, Ids

FORK_THRESHOLD = 1024  # tokens: the default of TRL's `fork_threshold_tokens`, and of slime


def persistent_history(episode: Episode) -> Packed:
    """The interaction as one growing text: q, x_0, a_0, o_0, a_1, o_1, ... with running positions, causal.

    The segments of a prompt tell which part is the new observation. Without recorded segments, it is the part after
    q and after the longest piece that was retained from earlier calls (see `observation`).
    """
    tokens, spans = _flatten(episode)
    sampled = [s for s in spans if s.kind == "response" and episode.calls[s.call].trainable]
    return _causal(tokens[:-1], [(s.call, s.start, tokens[s.start : s.stop]) for s in sampled])


def fork(episode: Episode) -> list[Packed]:
    """One sequence per unbroken stretch: it goes on while each prompt begins with everything before it.

    SkyRL, rLLM and prime-rl merge and split calls in this way. Every token keeps its exact state.
    """
    return realign(episode, threshold=0)


def realign(
    episode: Episode, encode: Callable[[Ids], Ids] | None = None, threshold: int = FORK_THRESHOLD
) -> list[Packed]:
    """As `fork`, but a sequence also goes on where the last response alone was written differently (TRL, slime).

    If a prompt leaves the sequence within the last response, and by fewer than `threshold` tokens, then its ids replace
    the rest of that response, which gets no gradient. As long as prompts repeat the sampled ids, `encode` stands for a
    trainer that builds the conversation from its text: it returns the ids that the text of a response has.
    """
    sequences: list[_Sequence] = []
    for t, call in enumerate(episode.calls):
        if not sequences or not sequences[-1].go_on(call.prompt, encode, threshold):
            sequences.append(_Sequence(call.prompt))
        sequences[-1].sample(t, call)
    return [_causal(s.tokens[:-1], s.sampled) for s in sequences if s.sampled]


class _Sequence:
    """A training sequence of `realign` that still grows."""

    def __init__(self, prompt: Ids) -> None:
        self.recorded = prompt  # the ids that the calls read and sampled
        self.tokens = prompt  # the ids that the trainer holds
        self.last = 0  # the number of tokens of the last response, which both end with
        self.sampled: list[tuple[int, int, Ids]] = []  # call, place in `tokens`, and ids that get a gradient

    def sample(self, t: int, call: Call) -> None:
        if call.trainable:
            self.sampled.append((t, len(self.tokens), call.completion))
        self.recorded = np.concatenate([self.recorded, call.completion])
        self.tokens = np.concatenate([self.tokens, call.completion])
        self.last = len(call.completion)

    def go_on(self, prompt: Ids, encode: Callable[[Ids], Ids] | None, threshold: int) -> bool:
        """Take the next prompt, if it leaves no more than the end of the last response."""
        start = len(self.recorded) - self.last
        matched = _common_prefix(self.recorded, prompt)
        drift = len(self.recorded) - matched
        if drift and (matched < start or drift >= threshold):
            return False
        kept, rest = matched - start, prompt[matched:]
        if not drift and encode is not None:
            response = self.recorded[start:]
            text = encode(response)
            kept = _common_prefix(response, text)
            rest = np.concatenate([text[kept:], rest])
        place = len(self.tokens) - self.last
        if self.sampled and self.sampled[-1][1] == place:  # the last response is one to train on
            t, _, ids = self.sampled.pop()
            self.sampled += [(t, place, ids[:kept])] if kept else []
        self.tokens = np.concatenate([self.tokens[: place + kept], rest])
        self.recorded = prompt
        return True


def mem1_official(episode: Episode, hidden: Callable[[Ids], int] | None = None) -> tuple[Packed, NDArray[np.bool_]]:
    """MEM1's public training code: the flattened history with running positions, and [T, T] who sees whom.

    A response sees q, the response before it, the information after that, and itself. Information sees only itself: not
    q, and not the search that it answers. So its last token, which predicts the first of the next response, knows
    nothing else. One copy of a response is both action and memory. `hidden` returns how many of its first tokens, the
    thoughts, a later response does not see. The pack's own `exit` does not apply.
    """
    _, spans = _flatten(episode)
    packed = persistent_history(episode)
    T = len(packed)
    visible = np.zeros((T, T), np.bool_)
    for i, span in enumerate(spans):
        own = slice(span.start, min(span.stop, T))
        visible[own, own] = np.tri(own.stop - own.start, dtype=np.bool_)
        if span.kind == "response":
            visible[own, : spans[0].stop] = True
            if i > 1:  # the prompt and the first response have no information before them
                before, information = spans[i - 2], spans[i - 1]
                thoughts = hidden(episode.calls[before.call].completion) if hidden is not None else 0
                visible[own, before.start + thoughts : before.stop] = True
                visible[own, information.start : information.stop] = True
    return packed, visible


def is_mem1(episode: Episode) -> bool:
    """Whether every prompt after the first is q, the whole last response, and something new."""
    q = stable_prefix(episode)
    return all(
        np.array_equal(call.prompt[q : q + len(last.completion)], last.completion)
        for last, call in zip(episode.calls, episode.calls[1:], strict=False)
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """A piece of a flattened history."""

    kind: str  # "prompt", "response" or "observation"
    call: int  # the call that reads or samples it
    start: int
    stop: int


def _flatten(episode: Episode) -> tuple[Ids, list[_Span]]:
    """The ids of the flattened history, and its spans: the first prompt, then responses and observations in turn."""
    q = stable_prefix(episode)
    pieces = [episode.calls[0].prompt]
    spans = [_Span("prompt", 0, 0, len(pieces[0]))]

    def add(kind: str, t: int, ids: Ids) -> None:
        pieces.append(ids)
        spans.append(_Span(kind, t, spans[-1].stop, spans[-1].stop + len(ids)))

    for t, call in enumerate(episode.calls):
        if t > 0:
            add("observation", t, observation(call, np.concatenate(pieces)[q:], episode.calls[t - 1].completion, q))
        add("response", t, call.completion)
    return np.concatenate(pieces), spans


def _causal(tokens: Ids, sampled: Sequence[tuple[int, int, Ids]]) -> Packed:
    """One sequence with running positions in which every row sees all before it; `sampled` has (call, place, ids)."""
    decisions = Decisions(
        row=np.concatenate([np.arange(at - 1, at - 1 + len(ids), dtype=np.int32) for _, at, ids in sampled]),
        token=np.concatenate([ids for _, _, ids in sampled]),
        call=np.repeat(np.array([t for t, _, _ in sampled], np.int32), [len(ids) for _, _, ids in sampled]),
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
