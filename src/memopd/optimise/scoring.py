"""Score a mini-batch with every model, in the same packs: π_old, π_ref, V_φ, and the teacher's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memopd.compile import Packed
from memopd.optimise import ranks
from memopd.optimise.batch import Bools, MiniBatch, Work, parts_of
from memopd.optimise.learner import Learner
from memopd.optimise.models import PolicyRoot, StatesRoot, ValueRoot
from memopd.score import Head
from memopd.types import Ids


@dataclass(frozen=True, slots=True)
class Guide:
    """The teacher's side of one mini-batch: its head, its states at the decisions of this rank's packs."""

    head: Head
    states: dict[int, Tensor]  # by the first place of a pack; [decisions, H_T], kept off the GPU until needed
    mask: Tensor  # [D] m^T


@dataclass(frozen=True, slots=True)
class Scored:
    """One mini-batch. All [D], on the CPU."""

    logp_old: Tensor
    logp_ref: Tensor
    value: Tensor
    thinking: Bools


def score_batches(
    learner: Learner, batches: list[MiniBatch], decode: Callable[[Ids], str]
) -> tuple[list[Scored], list[Guide | None]]:
    config, temperature = learner.config, learner.config.sampling.temperature
    scored: list[Scored] = []
    guides: list[Guide | None] = []
    for batch in batches:
        thinking = parts_of(batch, decode)
        old = policy_scores(learner.student, batch, temperature)
        ref = old if learner.reference is None else policy_scores(learner.reference, batch, temperature)
        value = torch.zeros_like(old) if learner.critic is None else values(learner.critic, batch)
        scored.append(Scored(old, ref, value, thinking))
        if learner.teacher is None or learner.head is None:
            guides.append(None)
            continue
        mask = teacher_mask(batch, thinking, config.teacher.mask)
        guides.append(guide(learner.teacher, learner.head, batch, mask, config.teacher.state == "aligned"))
    return scored, guides


@torch.no_grad()
def policy_scores(root: PolicyRoot, batch: MiniBatch, temperature: float) -> Tensor:
    """[D] log p of every sampled token."""
    return at_places(batch, batch.work, lambda packed: root(packed, temperature)[0])


@torch.no_grad()
def values(root: ValueRoot, batch: MiniBatch) -> Tensor:
    """[D] V_φ."""
    return at_places(batch, batch.work, root)


@torch.no_grad()
def guide(root: StatesRoot, head: Head, batch: MiniBatch, mask: Tensor, aligned: bool) -> Guide:
    """The teacher in the exact states, or in those of a flattened history, in the order of this rank's packs."""
    mine = [w for w, counts in ranks.deal(batch.work) if counts]
    if aligned:
        states = {
            int(w.place[0]): root(w.packed).cpu() for w, counts in ranks.deal(batch.work) if counts or _run(root, w)
        }
        return Guide(head, states, mask)
    # One history per episode serves all packs that hold its calls; each rank needs the episodes of its own packs.
    needed = {int(e) for w in mine for e in batch.episode[w.place]}
    passes = max(ranks.gather(len(needed)))
    histories = [(w, True) for e, w in enumerate(batch.persistent()) if e in needed]
    histories += [(min(batch.persistent(), key=lambda w: len(w.packed)), False)] * (passes - len(histories))
    flat: Tensor | None = None
    for w, counts in histories:
        found = root(w.packed).cpu()
        if flat is None:
            flat = found.new_zeros(len(batch), found.shape[1])
        if counts:
            flat[torch.as_tensor(w.place)] = found
    assert flat is not None
    return Guide(head, {int(w.place[0]): flat[torch.as_tensor(w.place)] for w in mine}, mask)


def at_places(batch: MiniBatch, work: Sequence[Work], run: Callable[[Packed], Tensor]) -> Tensor:
    """What `run` gives for every decision, wherever its pack was computed. [D], on the CPU, on every rank."""
    out = torch.zeros(len(batch), dtype=torch.float32)
    for w, counts in ranks.deal(work):
        found = run(w.packed)
        if counts:
            out[torch.as_tensor(w.place)] = found.float().cpu()
    return ranks.total(out)


def teacher_mask(batch: MiniBatch, thinking: Bools, which: str) -> Tensor:
    """m^T ⊆ m^act."""
    if which == "all":
        return torch.ones(len(batch), dtype=torch.bool)
    return torch.as_tensor(thinking if which == "think" else ~thinking)


def _run(root: StatesRoot, work: Work) -> bool:
    """Run for the other ranks' sake; the result counts for nothing."""
    root(work.packed)
    return False
