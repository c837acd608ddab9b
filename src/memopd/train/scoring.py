"""Scores the mini-batches with every model in the same packs: π_old, π_ref, V_φ, and the teacher's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.compile import Packed
from memopd.score import Divergence, Head, Target, reverse_kl
from memopd.train import ranks
from memopd.train.batch import Bools, Ints, MiniBatch, Work, parts_of
from memopd.train.later import Later, maybe_later
from memopd.train.learner import Learner
from memopd.train.models import PolicyRoot, StatesRoot, ValueRoot, master_dtype, on_device
from memopd.types import Ids


@dataclass(frozen=True, slots=True)
class Guide:
    """The teacher's head and states for one mini-batch."""

    head: Head
    states: dict[int, Tensor]  # of this rank's packs, by their first place; [decisions, H_T], on the device
    mask: Tensor  # [D] m^T
    divergence: Tensor | None = None  # [D] zeros; in the first epoch of `update`, each rank fills its own places
    measure: Divergence = reverse_kl  # from the policy to the teacher

    def target(self, work: Work) -> Target:
        return Target(self.head, self.states[int(work.place[0])], self.measure)


@maybe_later("logp_old", "logp_ref")
@dataclass(frozen=True)
class Scored:
    """One mini-batch. All [D], in host memory."""

    logp_old: Tensor  # without a reference it is unknown before the update
    logp_ref: Tensor  # without a reference the same as logp_old
    value: Tensor
    thinking: Bools  # all False without a teacher, which alone asks for it


def score_batches(
    learner: Learner, batches: list[MiniBatch], decode: Callable[[Ids], str]
) -> tuple[list[Scored], list[Guide | None]]:
    """One model after the other over all mini-batches, so that a frozen model need be on the device only once.

    Rewards need π_old only to compare it with a reference. If there is none, π_old is left to `update`, whose first
    forward pass computes it anyway.
    """
    temperature, teacher = learner.config.sampling.temperature, learner.config.teacher
    old: list[Any]
    ref: list[Any]
    value = [torch.zeros(len(b), dtype=master_dtype(learner.config.model)) for b in batches]
    with learner.passes():
        if learner.reference is None:
            old = ref = [Later(partial(policy_scores, learner.student, b, temperature)) for b in batches]
        else:
            old = [policy_scores(learner.student, b, temperature) for b in batches]
            with on_device(learner.reference, learner.device), learner.reference.passes():
                ref = [policy_scores(learner.reference, b, temperature) for b in batches]
        if learner.critic is not None:
            value = [values(learner.critic, b) for b in batches]
    thinking = [np.zeros(len(b), np.bool_) for b in batches]
    guides: list[Guide | None] = [None] * len(batches)
    if learner.teacher is not None and learner.head is not None:
        states = exact_states if teacher.state == "aligned" else persistent_states
        with on_device(learner.teacher, learner.device), learner.teacher.passes():
            found = [states(learner.teacher, b) for b in batches]
            thinking = [parts_of(b, decode) for b in batches]  # by the host, while a GPU computes the states
        guides = [
            Guide(
                learner.head,
                held,
                teacher_mask(t, teacher.mask),
                torch.zeros(len(b), device=learner.device),
                learner.divergence,
            )
            for b, held, t in zip(batches, found, thinking, strict=True)
        ]
    return [Scored(*columns) for columns in zip(old, ref, value, thinking, strict=True)], guides


@torch.no_grad()
def policy_scores(root: PolicyRoot, batch: MiniBatch, temperature: float) -> Tensor:
    """[D] log p of every sampled token."""
    with root.passes():
        return at_places(batch, lambda packed: root(packed, temperature)[0])


@torch.no_grad()
def values(root: ValueRoot, batch: MiniBatch) -> Tensor:
    """[D] V_φ."""
    return at_places(batch, root)


def at_places(batch: MiniBatch, run: Callable[[Packed], Tensor]) -> Tensor:
    """The results of `run` for all decisions, from the packs of all ranks. [D], in host memory, on every rank."""
    found: list[Tensor] = []
    place: list[Ints] = []
    for work, is_real in ranks.deal(batch.work):
        values = run(work.packed)  # stays on the device: the host starts the next pack and waits once, at the end
        found.append(values if is_real else values[:0])
        place.append(work.place if is_real else work.place[:0])
    out = torch.zeros(len(batch), dtype=found[0].dtype)
    out[torch.as_tensor(np.concatenate(place))] = torch.cat(found).cpu()
    return ranks.total(out)


@torch.no_grad()
def exact_states(root: StatesRoot, batch: MiniBatch) -> dict[int, Tensor]:
    """MemOPD: the teacher in the student's exact states, for this rank's packs."""
    found = {}
    for work, is_real in ranks.deal(batch.work):
        states = root(work.packed)
        if is_real:
            found[int(work.place[0])] = states
    return found


@torch.no_grad()
def persistent_states(root: StatesRoot, batch: MiniBatch) -> dict[int, Tensor]:
    """The control: the teacher in the states of a flattened history, in the format of `exact_states`.

    One history provides the states for all packs with calls of its episode, so a rank runs the episodes of its packs.
    """
    mine = [work for work, is_real in ranks.deal(batch.work) if is_real]
    needed = sorted({int(e) for work in mine for e in batch.episode[work.place]})
    histories = batch.persistent(needed)
    idle = max(ranks.gather(len(histories))) - len(histories)
    filler = batch.persistent([0]) * idle  # the ranks of a sharded model must make the same number of passes
    flat: Tensor | None = None
    for history in histories + filler:
        states = root(history.packed)
        flat = states.new_zeros(len(batch), states.shape[1]) if flat is None else flat
        flat[torch.as_tensor(history.place, device=flat.device)] = states
    assert flat is not None
    return {int(w.place[0]): flat[torch.as_tensor(w.place, device=flat.device)] for w in mine}


def teacher_mask(thinking: Bools, which: str) -> Tensor:
    """m^T ⊆ m^act."""
    think = torch.as_tensor(thinking)
    return {"all": torch.ones_like(think), "think": think, "action": ~think}[which]
