"""One pass over the vocabulary: log p(a), entropy and the reverse KL to a teacher from one chunk's logits.

Nothing of shape [decisions, vocabulary] outlives its chunk: the backward pass computes a chunk's logits again.
On a GPU two Triton kernels (`fused`) do the reductions; elsewhere, and in float64, plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memopd.score.head import Head

CHUNK = 1024  # decisions
GROUP = 4  # chunks whose gradients go into one product with the states: one rounding of dW per group


@dataclass(frozen=True, slots=True)
class Target:
    """The teacher's side of the divergence: its head and its hidden states, never its logits."""

    head: Head
    states: Tensor  # [D, H_T]


@dataclass(frozen=True, slots=True)
class VocabularyScores:
    logprob: Tensor  # [D] log p(a)
    entropy: Tensor  # [D]
    divergence: Tensor | None  # [D] KL(p ‖ p_T), over the vocabulary both have


def vocabulary_scores(
    head: Head,
    states: Tensor,  # [D, H]
    tokens: Tensor,  # [D]
    temperature: float = 1.0,
    teacher: Target | None = None,
    chunk: int = CHUNK,
) -> VocabularyScores:
    """Differentiable in `states` and in the head's weights. Log-probabilities are at `temperature`."""
    their_head = None if teacher is None else teacher.head
    theirs = None if teacher is None else teacher.states
    if states.is_cuda and head.weight.dtype != torch.float64:
        from memopd.score.fused import fused_scores  # Triton exists only where there is a GPU

        return VocabularyScores(*fused_scores(head, states, tokens, temperature, their_head, theirs, chunk, GROUP))
    columns: list[tuple[Tensor, ...]] = []
    for at in range(0, len(tokens), chunk):
        part = slice(at, at + chunk)
        their_part = None if theirs is None else theirs[part].to(states.device)
        arguments = (head, states[part], tokens[part], temperature, their_head, their_part)
        columns.append(checkpoint(reference_scores, *arguments, use_reentrant=False))
    logprob, entropy, *divergence = (torch.cat(c) for c in zip(*columns, strict=True))
    return VocabularyScores(logprob, entropy, divergence[0] if divergence else None)


def reference_scores(
    head: Head,
    states: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    teacher: Head | None = None,
    teacher_states: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The definition, in plain PyTorch: (log p(a), entropy[, reverse KL]), at least in float32.

    A teacher of another width is compared over the shared ids, both distributions renormalised.
    """
    logits = _precise(head.logits(states)) / temperature
    logp = logits.log_softmax(-1)
    logprob = logp.gather(-1, tokens[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    if teacher is None or teacher_states is None:
        return logprob, entropy
    with torch.no_grad():  # the teacher is frozen, whoever owns its weights
        teacher_logits = _precise(teacher.logits(teacher_states)) / temperature
    shared = min(logits.shape[-1], teacher_logits.shape[-1])
    logp = logits[:, :shared].log_softmax(-1)
    logp_T = teacher_logits[:, :shared].log_softmax(-1)
    ratio = (logp - logp_T).detach()  # its own gradient sums to Σ p ∇log p = 0, exactly only when it is left out
    return logprob, entropy, (logp.exp() * ratio).sum(-1)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
