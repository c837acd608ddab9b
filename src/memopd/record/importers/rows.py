"""Rows with a mask, as trainers keep them: a trajectory's ids, and which of them were sampled.

    ids    11 12 13 | 21  2 | 31 32 | 22 23  2
    mask    0  0  0 |  1  1 |  0  0 |  1  1  1     two calls: [11 12 13] → [21 2], [11 ... 32] → [22 23 2]

A turn is a maximal run of sampled ids; its prompt is everything before it. So the calls of a row share prefixes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memopd.types import Call, Episode


class Row(NamedTuple):
    """A trajectory without padding. All four have one value for each id."""

    ids: NDArray[Any]
    mask: NDArray[np.bool_]
    logprobs: NDArray[Any] | None = None
    rewards: NDArray[Any] | None = None


def turns(row: Row, policy_version: int = 0) -> list[Call]:
    """The calls of a row. A call's reward is the sum of the rewards from its first id to the next call's first id."""
    edges = np.diff(row.mask.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    earned = np.zeros(len(starts))
    if row.rewards is not None and len(starts):
        earned = np.add.reduceat(row.rewards.astype(np.float64), np.concatenate([[0], starts[1:]]))
    return [
        Call(
            row.ids[:start],
            row.ids[start:stop],
            None if row.logprobs is None else row.logprobs[start:stop],
            reward=float(reward),
            policy_version=policy_version,
            name=f"turn {turn}",
        )
        for turn, (start, stop, reward) in enumerate(zip(starts, stops, earned, strict=True))
    ]


def unpadded(
    name: str,
    ids: NDArray[Any],
    attention: NDArray[Any],
    mask: NDArray[Any],
    logprobs: NDArray[Any] | None,
    rewards: NDArray[Any] | None,
) -> Row:
    """A row without its padding on the left and on the right. `mask` and the last two belong to the last ids.

    `name` is what the trainer calls the mask, for error messages.
    """
    real, sampled = flags(attention, "attention_mask"), np.zeros(len(ids), bool)
    if len(real) != len(ids) or len(mask) > len(ids):
        raise ValueError(f"{len(ids)} ids, but {len(real)} values in attention_mask and {len(mask)} in {name}")
    sampled[len(ids) - len(mask) :] = flags(mask, name)
    if (sampled & ~real).any():
        raise ValueError(f"{name}: is 1 at {int(np.flatnonzero(sampled & ~real)[0])}, which is padding")
    (kept,) = real.nonzero()
    if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
        raise ValueError("attention_mask: has padding between the ids, not only before and after them")
    span = slice(kept[0], kept[-1] + 1) if len(kept) else slice(0, 0)

    def aligned(values: NDArray[Any] | None, what: str) -> NDArray[Any] | None:
        if values is None:
            return None
        if len(values) != len(mask):
            raise ValueError(f"{what}: {len(values)} values for {len(mask)} in {name}")
        return np.concatenate([np.zeros(len(ids) - len(mask)), values.astype(np.float64)])[span]

    return Row(ids[span], sampled[span], aligned(logprobs, "log-probabilities"), aligned(rewards, "rewards"))


def flags(values: NDArray[Any], name: str) -> NDArray[np.bool_]:
    """A mask of zeros and ones, in whatever type."""
    if values.ndim != 1 or not np.isin(values, (0, 1)).all():
        raise ValueError(f"{name}: must be a row of zeros and ones")
    return values.astype(bool)


def episode(id: str, task: str, calls: list[Call], more: float = 0.0) -> Episode:
    """An episode whose outcome is what its last call earned, and `more`."""
    outcome = calls[-1].reward + more
    return Episode(id, task, (*calls[:-1], replace(calls[-1], reward=0.0)), outcome)
