"""One path for every model: π_θ, π_old, π_ref and π_T through the vocabulary, V_φ through its value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memopd.compile import Packed, compile_calls, fill
from memopd.score.divergences import Divergence, reverse_kl
from memopd.score.head import head_of
from memopd.score.states import decision_states
from memopd.score.vocabulary import Target, vocabulary_scores
from memopd.types import Call, Sampling


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry per decision, pack after pack, in the order of each pack's decisions."""

    logprob: Tensor | None = None  # [D] log p(a)
    entropy: Tensor | None = None  # [D]
    divergence: Tensor | None = None  # [D] from the teacher, where one was given
    value: Tensor | None = None  # [D] V at g(t, k), of a critic


def score(
    model: Any,
    packs: Sequence[Packed],
    temperature: float = 1.0,
    attention: str = "auto",
    teacher: Target | None = None,
) -> Scores:
    """Score every sampled token in the state it was sampled in. Differentiable where gradients are on.

    A model with a value head (`AutoModelForTokenClassification` of one label) gives values, any causal LM the rest.
    `teacher` holds the states that `teacher_target` kept for the same packs, and the divergence to measure.
    """
    Sampling(temperature)  # refuses one that is not above 0
    decisions = sum(len(p.decisions) for p in packs)
    if teacher is not None and len(teacher.states) != decisions:
        raise ValueError(f"the teacher's states are of {len(teacher.states)} decisions, these packs have {decisions}")
    if is_critic(model):
        values = [model.score(decision_states(model, p, attention))[:, 0] for p in packs]
        return Scores(value=torch.cat(values))
    head, at, parts = head_of(model), 0, []
    for packed in packs:
        states = decision_states(model, packed, attention)
        tokens = torch.as_tensor(packed.decisions.token, device=states.device).long()
        theirs = None if teacher is None else replace(teacher, states=teacher.states[at : at + len(tokens)])
        parts.append(vocabulary_scores(head, states, tokens, temperature, theirs))
        at += len(tokens)
    return Scores(
        logprob=torch.cat([p.logprob for p in parts]),
        entropy=torch.cat([p.entropy for p in parts]),
        divergence=None if teacher is None else torch.cat([p.divergence for p in parts if p.divergence is not None]),
    )


def is_critic(model: Any) -> bool:
    if model.get_output_embeddings() is not None or not isinstance(getattr(model, "score", None), torch.nn.Linear):
        return False
    if model.score.out_features != 1:
        raise ValueError(f"a critic has one label, this {type(model).__name__} has {model.score.out_features}")
    return True


@torch.no_grad()
def teacher_target(
    teacher: Any,
    packs: Sequence[Packed],
    attention: str = "auto",
    keep_on: str | torch.device | None = None,
    divergence: Divergence = reverse_kl,
) -> Target:
    """What to keep of a frozen teacher: hidden states at the decisions (never logits) and its head.

    `keep_on="cpu"` keeps the states in host memory; each chunk returns to the GPU when it is needed.
    """
    head = head_of(teacher)
    # Detached, the head stays on the device it was used on when the teacher itself is moved away.
    bias = None if head.bias is None else head.bias.detach()
    head = replace(head, weight=head.weight.detach(), bias=bias)
    states = torch.cat([decision_states(teacher, p, attention).to(keep_on or head.weight.device) for p in packs])
    return Target(head, states, divergence)


def packed_logprobs(
    model: Any,
    calls: Sequence[Call],
    attention: str = "auto",
    temperature: float = 1.0,
    budget: int | None = None,
) -> list[Tensor]:
    """log p of every sampled token, one differentiable tensor per call: for your own training loop.

    Equal to running every call alone, computed with each shared prefix once. `budget` bounds the rows of a pack.
    A call that is not trainable gets an empty tensor.
    """
    packs = [compile_calls(calls)] if budget is None else fill(calls, budget)
    by_call: dict[int, Tensor] = {}
    for packed in packs:
        logprob = score(model, [packed], temperature, attention).logprob
        assert logprob is not None
        which, sizes = torch.as_tensor(packed.decisions.call).unique_consecutive(return_counts=True)
        by_call |= dict(zip(which.tolist(), logprob.split(sizes.tolist()), strict=True))
    empty = next(iter(by_call.values())).new_zeros(0)
    return [by_call.get(i, empty) for i in range(len(calls))]
