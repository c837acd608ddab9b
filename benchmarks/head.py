"""The vocabulary pass: log p(a), entropy and reverse KL over the full vocabulary, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

from benchmarks.timing import measure
from memopd.score import Head, Target, vocabulary_scores
from memopd.score.vocabulary import CHUNK, GROUP, reference_scores


@dataclass(frozen=True, slots=True)
class HeadArm:
    name: str
    computes: str
    seconds: float
    added_bytes: int
    products: float  # time / time of the matrix products it performs; NaN where not counted
    note: str = ""


@dataclass(frozen=True, slots=True)
class HeadResult:
    decisions: int
    vocabulary: int
    width: int
    teacher_width: int
    chunk: int
    product_seconds: float
    arms: tuple[HeadArm, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_head(
    decisions: int,
    vocabulary: int,
    width: int,
    teacher_width: int,
    dtype: torch.dtype,
    device: str,
    repeats: int = 5,
) -> HeadResult:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    states = random(decisions, width, scale=1.0).requires_grad_()
    weight = random(vocabulary, width, scale=width**-0.5).requires_grad_()
    theirs = random(decisions, teacher_width, scale=1.0)
    their_weight = random(vocabulary, teacher_width, scale=teacher_width**-0.5)
    tokens = torch.randint(vocabulary, (decisions,), generator=generator, device=device)
    head, target = Head(weight, None), Target(Head(their_weight, None), theirs)

    def clear() -> None:
        states.grad = weight.grad = None

    def ours() -> None:
        s = vocabulary_scores(head, states, tokens, teacher=target)
        assert s.divergence is not None
        (s.divergence.mean() - s.logprob.mean() - 0.001 * s.entropy.mean()).backward()

    def naive() -> None:
        logprob, entropy, divergence = reference_scores(head, states, tokens, 1.0, target.head, theirs)
        (divergence.mean() - logprob.mean() - 0.001 * entropy.mean()).backward()

    def products() -> None:
        """The products that `ours` performs and nothing else: forward, forward again, two for gradients."""
        with torch.no_grad():
            for s, t in zip(states.split(CHUNK), theirs.split(CHUNK), strict=True):
                s @ weight.T
                t @ their_weight.T
            gradient = torch.zeros_like(weight)
            for s, t in zip(states.split(GROUP * CHUNK), theirs.split(GROUP * CHUNK), strict=True):
                z = torch.empty(len(s), vocabulary, dtype=dtype, device=device)
                for part, into in zip(s.split(CHUNK), z.split(CHUNK), strict=True):
                    torch.mm(part, weight.T, out=into)
                for part in t.split(CHUNK):
                    part @ their_weight.T
                z @ weight
                gradient.addmm_(z.T, s)

    everything = "log p, entropy, KL"
    product_seconds = measure(products, repeats).seconds
    arms = [_measure("memopd", everything, ours, clear, repeats, product_seconds)]
    if device == "cuda":
        for name, any_length in (("any length", True), ("one length", False)):
            with all_compiled(any_length):
                arm = f"memopd, compiled for {name}"
                arms.append(_measure(arm, everything, ours, clear, repeats, product_seconds))
    arms.append(_measure("naive PyTorch", everything, naive, clear, repeats))
    if (liger := _liger(states, weight, theirs, their_weight)) is not None:
        arms.append(_measure("Liger fused linear JSD", "KL only", liger, clear, repeats))
    clear()
    return HeadResult(decisions, vocabulary, width, teacher_width, CHUNK, product_seconds, tuple(arms))


@contextmanager
def all_compiled(any_length: bool) -> Iterator[None]:
    """The same pass with what `torch.compile` makes of its two steps, in place of our kernels.

    Where `any_length`, one compilation serves chunks of any length, as training needs it: packs end in shorter ones.
    """
    from memopd.score import fused  # Triton exists only where there is a GPU

    torch._dynamo.reset()
    compiled = torch.compile(_reduce), torch.compile(_differentiate)

    def mark(dimension: int, *tensors: Tensor) -> None:
        for x in tensors if any_length else ():
            maybe_mark_dynamic(x, dimension)

    def reduce(z: Tensor, z_T: Tensor, tokens: Tensor, stats: Tensor, *_: Any) -> None:
        mark(0, z, z_T, tokens)
        stats.copy_(compiled[0](z, z_T, tokens))

    def differentiate(z: Tensor, z_T: Tensor, tokens: Tensor, stats: Tensor, grads: Tensor, *_: Any) -> None:
        mark(0, z, z_T, tokens)
        mark(1, stats, grads)
        compiled[1](z, z_T, tokens, stats, grads)

    kernels = fused.reduce_logits, fused.differentiate_logits
    fused.reduce_logits, fused.differentiate_logits = reduce, differentiate  # type: ignore[assignment]
    try:
        yield
    finally:
        fused.reduce_logits, fused.differentiate_logits = kernels


def _reduce(z: Tensor, z_T: Tensor, tokens: Tensor) -> Tensor:
    """As `fused.reduce_logits`, at temperature 1, for heads of one width that neither scale nor cap."""
    x, x_T = z.float(), z_T.float()
    lse, lse_T = x.logsumexp(-1), x_T.logsumexp(-1)
    logp = x - lse[:, None]
    logprob, entropy = logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    kl = (logp.exp() * (logp - x_T + lse_T[:, None])).sum(-1)
    return torch.stack([logprob, entropy, kl, lse, lse, lse_T])


def _differentiate(z: Tensor, z_T: Tensor, tokens: Tensor, stats: Tensor, grads: Tensor) -> None:
    _, entropy, kl, lse, _, lse_T = (row[:, None] for row in stats)
    g_logprob, g_entropy, g_kl = (row[:, None] for row in grads)
    logp, logp_T = z.float() - lse, z_T.float() - lse_T
    p = logp.exp()
    is_token = (torch.arange(z.shape[1], device=z.device) == tokens[:, None]).float()
    dz = g_logprob * (is_token - p) - g_entropy * p * (logp + entropy) + g_kl * p * (logp - logp_T - kl)
    z.copy_(dz)


def _measure(
    name: str,
    computes: str,
    work: Callable[[], Any],
    clear: Callable[[], None],
    repeats: int,
    products: float = float("nan"),
) -> HeadArm:
    try:
        m = measure(work, repeats, fresh=clear)
    except torch.OutOfMemoryError as why:
        torch.cuda.empty_cache()
        return HeadArm(name, computes, float("nan"), 0, float("nan"), str(why).split(". ")[0])
    return HeadArm(name, computes, m.seconds, m.added_bytes, m.seconds / products)


def _liger(states: Tensor, weight: Tensor, theirs: Tensor, their_weight: Tensor) -> Callable[[], Any] | None:
    """Where it is installed: the strongest published kernel for the same divergence. It gives no log p or entropy."""
    try:
        from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD
    except ImportError:
        return None
    loss = LigerFusedLinearJSD(jsd_beta=1.0, temperature=1.0)
    return lambda: loss(states, weight, theirs, their_weight, None).backward()
