"""What other trainers compute on the same calls: their sequences, run with the same weights, and what these cost.

A sequence is what a trainer pads or packs as one sample. Many of them are, token for token, what a recorded call read
and sampled: a sequence that only grew ends with such a call. So every distinct sequence runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd.agent.codec import codec_of
from memopd.attention.dense import DensePlan
from memopd.compile import Packed, compile_calls, fork, mem1_official, persistent_history, realign
from memopd.compile.controls import is_mem1
from memopd.models.attention import own_attention, planned_attention
from memopd.models.load import backbone
from memopd.models.support import check_dropout, check_length, sharing
from memopd.score import call_states
from memopd.types import Call, Episode, Ids
from memopd.verify.distance import Distance

PERSISTENT, OFFICIAL, FORK, REALIGN = "persistent history", "mem1-official", "fork", "realign"
LONGEST_MASK = 16_384  # rows: a mask of [T, T] for more would not fit

By = dict[str, list[Packed]]  # the sequences of each arm; their calls are numbered through all episodes


@dataclass(frozen=True, slots=True)
class Arm:
    """What a way to build training sequences costs, and how wrong its log-probabilities are."""

    arm: str
    sequences: int
    rows: int  # computed if each sequence runs by itself
    shared_rows: int  # if every beginning that several sequences have in common runs once: the best that packing can do
    lost: int  # sampled tokens that get no gradient; the numbers below are of the others
    p99_logprob: float
    max_logprob: float
    top1: float  # share
    top1_changed: int  # decisions
    false_clip: float  # share


def sequences_of(episodes: Sequence[Episode], tokenizer: Any = None) -> By:
    """The sequences of every arm but mem1-official, whose rows do not all see what came before them."""
    encode = None if tokenizer is None else reencode(tokenizer)
    arms: dict[str, Callable[[Episode], list[Packed]]] = {
        PERSISTENT: lambda e: [persistent_history(e)],
        FORK: fork,
        REALIGN: lambda e: realign(e, encode),
    }
    first = np.cumsum([0] + [len(e.calls) for e in episodes])
    return {
        name: [numbered(s, at) for e, at in zip(episodes, first, strict=False) for s in make(e)]
        for name, make in arms.items()
    }


def numbered(packed: Packed, first: int) -> Packed:
    """The same sequence; its calls are numbered from `first` on."""
    decisions = packed.decisions
    return replace(packed, decisions=replace(decisions, call=(decisions.call + first).astype(np.int32)))


def reencode(tokenizer: Any) -> Callable[[Ids], Ids]:
    """The ids that a tokenizer gives for the text of some ids. Special tokens stay what they are."""
    encode = codec_of(tokenizer).encode
    return lambda ids: encode(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def thoughts(tokenizer: Any) -> Callable[[Ids], int]:
    """How many of a response's first tokens reach to the end of its `</think>`; 0 if it has none."""
    decode = codec_of(tokenizer).decode

    def count(ids: Ids) -> int:
        if "</think>" not in decode(ids):
            return 0
        low, high = 1, len(ids)  # the number of tokens whose text is the first to contain the end
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if "</think>" in decode(ids[:middle]) else (middle + 1, high)
        return low

    return count


class CausalRuns:
    """Runs sequences alone with the model's own attention, each distinct one once. Keeps only the rows of decisions."""

    def __init__(self, model: Any, sequences: Iterable[Packed]) -> None:
        self.model = model
        self.needed: dict[bytes, NDArray[np.int64]] = {}
        self.states: dict[bytes, Tensor] = {}
        for sequence in sequences:
            key = sequence.tokens.tobytes()
            rows = sequence.decisions.row.astype(np.int64)
            self.needed[key] = np.union1d(self.needed[key], rows) if key in self.needed else np.unique(rows)

    def __call__(self, sequence: Packed) -> Tensor:
        """[D, H] at the decisions of one of the sequences."""
        key = sequence.tokens.tobytes()
        if key not in self.states:
            check_length(self.model, len(sequence))
            with own_attention(self.model):
                states = call_states(self.model, sequence.tokens, 0)
            self.states[key] = states[torch.as_tensor(self.needed[key], device=states.device)]
        rows = np.searchsorted(self.needed[key], sequence.decisions.row)
        return self.states[key][torch.as_tensor(rows, device=self.states[key].device)]


def alone(calls: Sequence[Call]) -> list[Packed]:
    """A sequence per trainable call."""
    return [numbered(compile_calls([call]), t) for t, call in enumerate(calls) if call.trainable]


class _MaskedPlan(DensePlan):
    """Dense attention in which any row may see any other."""

    def __init__(self, positions: Ids, visible: NDArray[np.bool_], device: torch.device) -> None:
        self.keep = False
        self.positions = torch.as_tensor(positions, device=device)
        self.longest = int(positions.max()) + 1
        self.mask = torch.as_tensor(visible, device=device)
        self._windowed = {}


def official_states(model: Any, episode: Episode, hidden: Callable[[Ids], int] | None) -> Tensor:
    """[D, H] as MEM1's public training code computes them."""
    if not sharing(model).shared:
        raise ValueError("the model runs its calls unshared, so there is no way to give it a mask")
    packed, visible = mem1_official(episode, hidden)
    check_length(model, len(packed))
    check_dropout(model)
    device = next(model.parameters()).device
    ids, positions = (torch.as_tensor(x, device=device).long()[None] for x in (packed.tokens, packed.positions))
    with planned_attention(model):
        states = backbone(model)(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            memopd_scheme=_MaskedPlan(packed.positions, visible, device),
        ).last_hidden_state[0]
    return states[torch.as_tensor(packed.decisions.row, device=device).long()]


def check_mem1(episodes: Sequence[Episode]) -> None:
    """Raise an error if mem1-official has no meaning for these episodes, or is too large."""
    if other := [e.id for e in episodes if not is_mem1(e)]:
        raise ValueError(f"episode {other[0]!r} does not have MEM1's form: q, the last response, something new")
    longest = max(len(persistent_history(e)) for e in episodes)
    if longest > LONGEST_MASK:
        raise ValueError(f"its mask has {longest:,} rows, and at most {LONGEST_MASK:,} fit")


def arms_of(
    by: Mapping[str, Sequence[Packed]], runs: Mapping[str, Distance], kept: Mapping[str, Tensor]
) -> tuple[Arm, ...]:
    """A row per arm. `runs` has the arms that were measured, `kept` the decisions that have a gradient, if not all."""
    made = []
    for name, sequences in by.items():
        if name not in runs:
            continue
        which = kept.get(name)
        d = runs[name].as_sampled(which)
        measured = len(runs[name].same) if which is None else int(which.sum())
        made.append(
            Arm(
                name,
                len(sequences),
                sum(map(len, sequences)),
                shared_rows(sequences),
                len(runs[name].same) - measured,
                d.p99_logprob,
                d.max_logprob,
                d.top1,
                round((1 - d.top1) * measured),
                d.false_clip,
            )
        )
    return tuple(made)


def shared_rows(sequences: Sequence[Packed]) -> int:
    """The rows that are left if every common beginning is computed once."""
    end = np.zeros(1, np.int32)  # a completion of one token needs no row
    return len(compile_calls([Call(s.tokens, end) for s in sequences]))
