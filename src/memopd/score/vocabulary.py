"""One pass over the vocabulary computes log p(a), entropy and the divergence from a teacher, chunk by chunk.

Nothing of shape [decisions, vocabulary] outlives its chunk: the backward pass computes a chunk's logits again.
On a GPU two Triton kernels (`fused`) do the reductions; elsewhere, and in float64, plain PyTorch does. The kernels
support only the reverse KL. Another divergence runs in plain PyTorch in a separate pass: log p(a) must come from the
same kernels with and without a teacher, or π_θ would differ from π_old by rounding before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memopd.score.divergences import Divergence, checked, reverse_kl
from memopd.score.head import Head

CHUNK = 1024  # decisions
CPU_LOGITS = 1 << 24  # per chunk on a CPU: eight such tensors live at once, and larger ones are no faster
GROUP = 4  # chunks whose gradients go into one product with the states: one rounding of dW per group


@dataclass(frozen=True, slots=True)
class Target:
    """The teacher's head and hidden states (never its logits), and the divergence to compute."""

    head: Head
    states: Tensor  # [D, H_T]
    divergence: Divergence = reverse_kl


@dataclass(frozen=True, slots=True)
class VocabularyScores:
    logprob: Tensor  # [D] log p(a)
    entropy: Tensor  # [D]
    divergence: Tensor | None  # [D] from the teacher, over the vocabulary both have


def vocabulary_scores(
    head: Head,
    states: Tensor,  # [D, H]
    tokens: Tensor,  # [D]
    temperature: float = 1.0,
    teacher: Target | None = None,
    chunk: int | None = None,  # decisions whose logits are held at once
) -> VocabularyScores:
    """Differentiable in `states` and in the head's weights. Log-probabilities are at `temperature`."""
    if chunk is None:
        chunk = CHUNK if states.is_cuda else max(1, min(CHUNK, CPU_LOGITS // len(head.weight)))
    if states.is_cuda and head.weight.dtype != torch.float64:
        return _fused(head, states, tokens, temperature, teacher, chunk)

    def plain(part: slice) -> tuple[Tensor, ...]:
        target = _teacher_arguments(teacher, part, states.device)
        return reference_scores(head, states[part], tokens[part], temperature, *target)

    logprob, entropy, *divergence = _by_chunk(plain, len(tokens), chunk)
    return VocabularyScores(logprob, entropy, divergence[0] if divergence else None)


def _fused(
    head: Head, states: Tensor, tokens: Tensor, temperature: float, teacher: Target | None, chunk: int
) -> VocabularyScores:
    from memopd.score.fused import fused_scores  # Triton exists only with a GPU

    fused = teacher is not None and teacher.divergence is reverse_kl
    target = (teacher.head, teacher.states) if teacher is not None and fused else (None, None)
    logprob, entropy, kl = fused_scores(head, states, tokens, temperature, target[0], target[1], chunk, GROUP)
    if teacher is None or fused:
        return VocabularyScores(logprob, entropy, kl)

    def plain(part: slice) -> tuple[Tensor, ...]:
        logits = _precise(head.logits(states[part])) / temperature
        return (divergence_from(logits, temperature, *_teacher_arguments(teacher, part, states.device)),)

    (divergence,) = _by_chunk(plain, len(tokens), chunk)
    return VocabularyScores(logprob, entropy, divergence)


def _by_chunk(scores: Callable[[slice], tuple[Tensor, ...]], count: int, chunk: int) -> tuple[Tensor, ...]:
    parts = [checkpoint(scores, slice(at, at + chunk), use_reentrant=False) for at in range(0, count, chunk)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _teacher_arguments(teacher: Target | None, part: slice, device: torch.device) -> tuple[Any, ...]:
    """The last arguments of `reference_scores` and `divergence_from`, for one chunk."""
    return () if teacher is None else (teacher.head, teacher.states[part].to(device), teacher.divergence)


def reference_scores(
    head: Head,
    states: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    teacher: Head | None = None,
    teacher_states: Tensor | None = None,
    divergence: Divergence = reverse_kl,
) -> tuple[Tensor, ...]:
    """The definition, in plain PyTorch: (log p(a), entropy[, divergence]), in at least float32."""
    logits = _precise(head.logits(states)) / temperature
    logp = logits.log_softmax(-1)
    logprob = logp.gather(-1, tokens[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    if teacher is None or teacher_states is None:
        return logprob, entropy
    return logprob, entropy, divergence_from(logits, temperature, teacher, teacher_states, divergence)


def divergence_from(
    logits: Tensor, temperature: float, teacher: Head, teacher_states: Tensor, divergence: Divergence
) -> Tensor:
    """The divergence over the ids that student and teacher share, with both distributions renormalised.

    Heads are padded to different widths: Qwen2.5-3B has 151,936 logits and 7B has 152,064.
    """
    with torch.no_grad():  # the teacher is frozen, even if its weights require gradients
        teacher_logits = _precise(teacher.logits(teacher_states)) / temperature
    shared = min(logits.shape[-1], teacher_logits.shape[-1])
    student = logits[:, :shared]
    return checked(divergence(student, teacher_logits[:, :shared]), student)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
