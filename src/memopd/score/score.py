"""Scores packs with every model in the same way: π_θ, π_old, π_ref and π_T by the vocabulary, V_φ by its value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from memopd.compile import Packed, compile_calls, fill
from memopd.models.device import to_device
from memopd.score.divergences import Divergence, reverse_kl
from memopd.score.head import head_of
from memopd.score.states import decision_states, many_passes
from memopd.score.vocabulary import Target, vocabulary_scores
from memopd.types import Call, Sampling


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry per decision, pack after pack, in the order of each pack's decisions."""

    logprob: Tensor | None = None  # [D] log p(a)
    entropy: Tensor | None = None  # [D]
    divergence: Tensor | None = None  # [D] from the teacher, if there is one
    value: Tensor | None = None  # [D] V at g(t, k), of a critic


def score(
    model: Any,
    packs: Sequence[Packed],
    temperature: float = 1.0,
    attention: str = "auto",
    teacher: Target | None = None,
) -> Scores:
    """Score every sampled token in the state in which it was sampled. Differentiable if gradients are enabled.

    A model with a value head (`AutoModelForTokenClassification` with one label) gives values; a causal LM gives the
    rest. `teacher` holds the states from `teacher_target` for the same packs, and the divergence to compute.
    """
    Sampling(temperature)  # raises an error if it is not above 0
    decisions = sum(len(p.decisions) for p in packs)
    if teacher is not None and len(teacher.states) != decisions:
        raise ValueError(f"the teacher's states are of {len(teacher.states)} decisions, these packs have {decisions}")
    if is_critic(model):
        precise = model.score.weight.dtype  # a value head over a base in half precision is in float32
        with many_passes(model):
            values = [model.score(decision_states(model, p, attention).to(precise))[:, 0] for p in packs]
        return Scores(value=torch.cat(values))
    head, at, parts = head_of(model), 0, []
    with many_passes(model):
        for packed in packs:
            states = decision_states(model, packed, attention)
            tokens = to_device(packed.decisions.token, states.device, torch.long)
            target = None if teacher is None else replace(teacher, states=teacher.states[at : at + len(tokens)])
            parts.append(vocabulary_scores(head, states, tokens, temperature, target))
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
        raise ValueError(f"a critic has one label, but this {type(model).__name__} has {model.score.out_features}")
    return True


@torch.no_grad()
def teacher_target(
    teacher: Any,
    packs: Sequence[Packed],
    attention: str = "auto",
    keep_on: str | torch.device | None = None,
    divergence: Divergence = reverse_kl,
) -> Target:
    """The hidden states of a frozen teacher at the decisions (never its logits), and its head.

    `keep_on="cpu"` keeps the states in host memory; each chunk moves to the GPU when it is needed.
    """
    head = head_of(teacher)
    # The detached head stays on its device even if the teacher itself moves to another one later.
    bias = None if head.bias is None else head.bias.detach()
    head = replace(head, weight=head.weight.detach(), bias=bias)
    with many_passes(teacher):
        states = [decision_states(teacher, p, attention).to(keep_on or head.weight.device) for p in packs]
    return Target(head, torch.cat(states), divergence)


@overload
def packed_logprobs(
    model: Any,
    calls: Sequence[Call],
    attention: str = ...,
    temperature: float = ...,
    budget: int | None = ...,
    entropies: Literal[False] = ...,
) -> list[Tensor]: ...


@overload
def packed_logprobs(
    model: Any,
    calls: Sequence[Call],
    attention: str = ...,
    temperature: float = ...,
    budget: int | None = ...,
    *,
    entropies: Literal[True],
) -> tuple[list[Tensor], list[Tensor]]: ...


def packed_logprobs(
    model: Any,
    calls: Sequence[Call],
    attention: str = "auto",
    temperature: float = 1.0,
    budget: int | None = None,
    entropies: bool = False,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """log p of every sampled token, one differentiable tensor per call: for your own training loop.

    The result equals running every call alone, but each shared prefix is computed once. `budget` limits the rows of a
    pack. A call that is not trainable gets an empty tensor. `entropies=True` adds a second list: the entropy of the
    distribution from which each token was sampled.
    """
    packs = [compile_calls(calls)] if budget is None else fill(calls, budget)
    logprob: dict[int, Tensor] = {}
    entropy: dict[int, Tensor] = {}
    for packed in packs:
        scores = score(model, [packed], temperature, attention)
        assert scores.logprob is not None
        assert scores.entropy is not None
        which, sizes = torch.as_tensor(packed.decisions.call).unique_consecutive(return_counts=True)
        logprob |= zip(which.tolist(), scores.logprob.split(sizes.tolist()), strict=True)
        entropy |= zip(which.tolist(), scores.entropy.split(sizes.tolist()), strict=True)
    empty = next(iter(logprob.values())).new_zeros(0)
    by_call = [logprob.get(i, empty) for i in range(len(calls))]
    return (by_call, [entropy.get(i, empty) for i in range(len(calls))]) if entropies else by_call
