"""Divergences measure how far a student's distribution is from its teacher's. Each is a function of two rows of logits.

    divergence(student [n, V], teacher [n, V]) -> [n]

Both arguments are over the same V ids, at the sampling temperature, in at least float32. If one vocabulary is wider,
only the shared ids remain, and `log_softmax` renormalises both. The teacher's logits carry no gradient. Your own
function is called in the same way, chunk by chunk. It may use as many tensors of shape [n, V] as it needs, because
none of them outlives its chunk.

With p for the student, p_T for the teacher, and Σ over the V ids:

    reverse_kl   KL(p ‖ p_T) = Σ p (log p − log p_T)           fused on a GPU; the paper's, and the default
    forward_kl   KL(p_T ‖ p) = Σ p_T (log p_T − log p)
    jsd:β        β KL(p_T ‖ m) + (1 − β) KL(p ‖ m), with m = β p_T + (1 − β) p
    top_k:k      KL(p ‖ p_T) over k + 1 outcomes: the teacher's k likeliest ids, and all others together
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memopd.names import resolve, takes

Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p ‖ p_T): penalises probability where the teacher has little."""
    return _reverse(student.log_softmax(-1), teacher.log_softmax(-1))


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_T ‖ p): penalises missing probability where the teacher has much."""
    logp, logp_T = student.log_softmax(-1), teacher.log_softmax(-1)
    return (logp_T.exp() * (logp_T - logp)).sum(-1)


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence of GKD (Agarwal et al., 2024); β is the teacher's weight.

    Divided by β it tends to KL(p_T ‖ p) as β → 0, and divided by 1 − β to KL(p ‖ p_T) as β → 1 (Huszár, 2015). The
    divergence itself would vanish at both ends, so β = 0 means the forward and β = 1 the reverse KL, as in TRL.
    """
    if beta == 0:
        return forward_kl(student, teacher)
    if beta == 1:
        return reverse_kl(student, teacher)
    logp, logp_T = student.log_softmax(-1), teacher.log_softmax(-1)
    logm = torch.logaddexp(logp_T + math.log(beta), logp + math.log1p(-beta))
    return (beta * logp_T.exp() * (logp_T - logm) + (1 - beta) * logp.exp() * (logp - logm)).sum(-1)


def top_k(student: Tensor, teacher: Tensor, k: int = 64) -> Tensor:
    """KL(p ‖ p_T) over the teacher's k likeliest ids and one bucket for all others.

    With the bucket both sides sum to one, so that the student cannot gain by moving probability to other ids.
    """
    if k >= teacher.shape[-1]:
        return reverse_kl(student, teacher)
    ids = teacher.topk(k, dim=-1).indices
    return _reverse(_with_tail(student, ids), _with_tail(teacher, ids))


def _with_tail(logits: Tensor, ids: Tensor) -> Tensor:
    """[n, k + 1]: log-probabilities of `ids`, then that of all other ids together."""
    logp = logits.log_softmax(-1)
    tail = logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logp.gather(-1, ids), tail], -1)


def _reverse(logp: Tensor, logp_T: Tensor) -> Tensor:
    ratio = (logp - logp_T).detach()  # its gradient would add Σ p ∇log p = 0, which is exactly 0 only when left out
    return (logp.exp() * ratio).sum(-1)


# ---- from a name to a function ------------------------------------------------------------------------------------

DIVERGENCES: dict[str, Divergence] = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd, "top_k": top_k}
SETTING = "teacher.divergence"


def divergence_of(name: str) -> Divergence:
    """The divergence of a name: a built-in one, `jsd:0.5` or `top_k:64` with a number, or `module:function`."""
    known, colon, number = name.partition(":")
    if colon and known == "jsd":
        return partial(jsd, beta=_number(name, number, float, "between 0 and 1, as in jsd:0.5"))
    if colon and known == "top_k":
        return partial(top_k, k=_number(name, number, int, "a whole number above 0, as in top_k:64"))
    if colon and known in DIVERGENCES:
        raise ValueError(f"{SETTING}: {known} takes no number, got {name!r}")
    found = resolve(SETTING, name, DIVERGENCES)
    if inspect.isclass(found) or not takes(found, 2):
        raise ValueError(f"{SETTING}: {name!r} must be a function of two arguments, a student's and a teacher's logits")
    return found


def _number(name: str, text: str, kind: type[int] | type[float], what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= 1 if kind is float else value > 0):
        raise ValueError(f"{SETTING}: the number of {name!r} must be {what}")
    return value


def checked(divergence: Tensor, student: Tensor) -> Tensor:
    """Check the result of a user's function here, where the error can still name the function's mistake."""
    rows = len(student)
    if not isinstance(divergence, Tensor) or divergence.shape != (rows,):
        got = f"shape {list(divergence.shape)}" if isinstance(divergence, Tensor) else type(divergence).__name__
        raise ValueError(f"{SETTING}: must return one number per row of logits, shape [{rows}], got {got}")
    # A function that leaves out some rows may give a chunk of them zeros without a gradient.
    if student.requires_grad and not divergence.requires_grad and divergence.any():
        raise ValueError(
            f"{SETTING}: must return numbers with a gradient in the student's logits, or it teaches nothing: compute "
            "them without detach"
        )
    return divergence
