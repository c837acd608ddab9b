"""Turns episodes into mini-batches: their decisions and packs.

Mini-batches are sets of episodes, drawn before packing, and no pack spans two of them. Every quantity of a decision is
stored at its *place* in the mini-batch (episode after episode, call after call, token after token), independently of
the pack that computed it, so that results do not depend on packing, accumulation or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from memopd.compile import Packed, fill, persistent_history, side_by_side, unshared
from memopd.config import OptimiseConfig
from memopd.types import Call, Episode, Ids

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass: a pack, and the places of its decisions in the mini-batch."""

    packed: Packed
    place: Ints  # [decisions of the pack]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    episodes: tuple[Episode, ...]
    calls: tuple[Call, ...]  # the trainable ones, in order
    work: tuple[Work, ...]  # packs of exact states
    episode: Ints  # [D] the episode of each decision, counted within the mini-batch
    call: Ints  # [D] its call, an index into `calls`
    last: Bools  # [D] the episode's last decision
    call_last: Bools  # [D] its call's last decision
    call_reward: Floats  # [calls] r_t
    budget: int  # rows per pack

    def __len__(self) -> int:
        return len(self.episode)

    @property
    def rows(self) -> int:
        return sum(len(w.packed) for w in self.work)

    @property
    def tokens(self) -> int:
        """The number of rows that independent calls would need."""
        return sum(map(path_length, self.calls))

    @property
    def logp_sampled(self) -> Floats:
        """[D] log p of every sampled token under the policy that sampled it, as recorded."""
        for call in self.calls:
            if call.logprobs is None:
                raise ValueError(f"{call.name}: has no log-probabilities of the policy that sampled it")
        return np.concatenate([np.asarray(call.logprobs) for call in self.calls])

    def calls_in(self, work: Work) -> tuple[Ints, Ints, Ints]:
        """The calls of a pack (indices into `calls`), the number of each decision's call among them, their sizes."""
        held, number, size = np.unique(self.call[work.place], return_inverse=True, return_counts=True)
        assert all(len(self.calls[i].completion) == n for i, n in zip(held, size, strict=True)), "a call was cut"
        return held, number, size

    def persistent(self, episodes: Iterable[int]) -> list[Work]:
        """The control: flattened histories in place of the exact states.

        Each history is a separate sequence; several share a pack, so that a device has enough work at once. A history
        that is longer than the budget is a pack by itself, because the control must not cut it.
        """
        first = np.searchsorted(self.episode, np.arange(len(self.episodes)))
        packs: list[Work] = []
        group: list[Work] = []
        for e in episodes:
            history = persistent_history(self.episodes[e])
            if group and sum(len(w.packed) for w in group) + len(history) > self.budget:
                packs.append(_together(group))
                group = []
            group.append(Work(history, first[e] + np.arange(len(history.decisions))))
        return [*packs, _together(group)] if group else packs


def _together(group: Sequence[Work]) -> Work:
    """Histories as separate trees of one pack, in the order given."""
    size = [int(w.packed.decisions.call.max()) + 1 for w in group]
    calls = np.cumsum([0, *size])
    packed = side_by_side([w.packed for w in group], [range(a, b) for a, b in pairwise(calls)])
    return Work(packed, np.concatenate([w.place for w in group]))


def mini_batch(episodes: Sequence[Episode], budget: int, micro_batch: int = 0, share: bool = True) -> MiniBatch:
    """Packs of at most `budget` rows, each with calls of at most `micro_batch` episodes (0: no limit)."""
    calls = [c for e in episodes for c in e.calls if c.trainable]
    owner = np.repeat(np.arange(len(episodes)), [sum(c.trainable for c in e.calls) for e in episodes])
    size = np.array([len(c.completion) for c in calls], np.int64)
    first = np.concatenate([[0], np.cumsum(size)])
    call = np.repeat(np.arange(len(calls)), size)
    episode = owner[call]
    work: list[Work] = []
    step = micro_batch or len(episodes)
    for at in range(0, len(episodes), step):
        start, stop = np.searchsorted(owner, [at, at + step])
        packs = (fill if share else unshared)(calls[start:stop], budget)
        work += [Work(p, _places(p, first[start:stop])) for p in packs]
    return MiniBatch(
        tuple(episodes),
        tuple(calls),
        tuple(work),
        episode,
        call,
        np.diff(episode, append=-1) != 0,
        np.diff(call, append=-1) != 0,
        np.array([r for e in episodes for r in _call_rewards(e)]),
        budget,
    )


def _places(packed: Packed, first: Ints) -> Ints:
    """A pack contains whole calls, so places count up from the first decision of each call."""
    call = packed.decisions.call.astype(np.int64)
    begin = np.flatnonzero(np.diff(call, prepend=-1))
    within = np.arange(len(call)) - np.repeat(begin, np.diff(np.append(begin, len(call))))
    return first[call] + within


def _call_rewards(episode: Episode) -> list[float]:
    """r_t of the trainable calls. The reward of a call that is context only goes to the trainable call before it, or to
    the first one if there is none before it: an episode's return is the sum of all r_t."""
    rewards: list[float] = []
    early = 0.0
    for call in episode.calls:
        if call.trainable:
            rewards.append(early + call.reward)
            early = 0.0
        elif rewards:
            rewards[-1] += call.reward
        else:
            early += call.reward
    return rewards


def path_length(call: Call) -> int:
    return len(call.prompt) + len(call.completion) - 1


def usable(episodes: Sequence[Episode], budget: int, temperature: float) -> tuple[list[Episode], list[str]]:
    """(the episodes to train on, the reasons why the others were left out).

    One call that is too long leaves out its whole episode, so that all arms of a comparison leave out the same ones.
    """
    kept, reasons = [], []
    for episode in episodes:
        _check_distribution(episode, temperature)
        if not any(c.trainable for c in episode.calls):
            reasons.append(f"episode {episode.id!r}: none of its calls is trainable")
        elif (longest := max(path_length(c) for c in episode.calls if c.trainable)) > budget:
            reasons.append(f"episode {episode.id!r}: a call needs {longest} rows and the budget is {budget}")
        else:
            kept.append(episode)
    return kept, reasons


def _check_distribution(episode: Episode, temperature: float) -> None:
    """Ratios and divergences must use the distribution from which the tokens were sampled."""
    s = episode.sampling
    if not s.is_whole:
        raise ValueError(
            f"episode {episode.id!r} was sampled {s.restriction}: its log-probabilities are not those of the "
            "policy; to train, sample from the whole distribution"
        )
    if s.temperature != temperature:
        raise ValueError(
            f"episode {episode.id!r} was sampled at temperature {s.temperature}: set sampling.temperature to it "
            f"(it is {temperature})"
        )


def compile_batches(
    episodes: list[Episode], config: OptimiseConfig, seed: int, step: int, left_out: Sequence[str] = ()
) -> list[MiniBatch]:
    """The mini-batches of a step. `left_out` are the reasons why it has no other episodes."""
    if not episodes:
        raise ValueError(": ".join([f"step {step}: every episode was left out", *left_out[:1]]))
    o = config
    groups = draw(len(episodes), o.mini_batch, seed, step)
    return [mini_batch([episodes[i] for i in group], o.budget, o.micro_batch, o.share) for group in groups]


def draw(count: int, mini_batch: int, seed: int, step: int) -> list[list[int]]:
    """Episodes 0..count-1 in a random order, split into mini-batches. Depends only on the seed and the step.

    If episodes were left out, all mini-batches are a little smaller, because an optimiser step on the few that remain
    would be noise. All epochs of a step use the same mini-batches, so that π_θ always runs in the packs of π_old.
    """
    order = np.random.default_rng([seed, step]).permutation(count)
    return [sorted(part.tolist()) for part in np.array_split(order, -(-count // mini_batch))]


def parts_of(batch: MiniBatch, decode: Callable[[Ids], str]) -> Bools:
    """[D] True if a decision belongs to the <think> part of its response, False if to the action."""
    size = [len(c.completion) for c in batch.calls]
    within = np.arange(len(batch)) - np.repeat(np.cumsum([0, *size[:-1]]), size)
    return within < np.repeat([_think_length(c.completion, decode) for c in batch.calls], size)


def _think_length(ids: Ids, decode: Callable[[Ids], str]) -> int:
    """The number of tokens up to the one in which </think> ends; all tokens if there is no </think>."""
    if "</think>" not in decode(ids):
        return len(ids)
    low, high = 1, len(ids)  # bisection for the shortest prefix with the tag: every longer prefix contains it too
    while low < high:
        middle = (low + high) // 2
        if "</think>" in decode(ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low
