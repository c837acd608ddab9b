"""The vocabulary pass on a GPU: two Triton kernels read each chunk's logits once forward and once backward.

The results are those of `vocabulary.reference_scores`; cuBLAS computes the products with the head's weights. If
`torch.compile` generates the same two steps, they take up to 7 % longer (`python -m benchmarks head`, and
benchmarks/README.md). Per chunk:

    forward    z = states @ W.T, z_T likewise   -> row sums -> log p(a), entropy, reverse KL
    backward   z and z_T again                  -> dz replaces z, in place; then per group of chunks
                                                   dstates = dz @ W, dW += dz.T @ states

With p = softmax(z) over the vocabulary or, for the divergence, over the ids that both models have:

    d log p(a) / dz = 1[a] − p      dH / dz = −p (log p + H)      dKL / dz = p (log p − log p_T − KL)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopd.score.head import Head

BLOCK = 4096  # logits that a program reads at once


def fused_scores(
    head: Head, states: Tensor, tokens: Tensor, temperature: float, teacher: Head | None, teacher_states: Tensor | None,
    chunk: int, group: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(log p(a), entropy, reverse KL), float32; differentiable in `states` and the head's weight and bias."""
    logprob, entropy, divergence = _Fused.apply(
        states, head.weight, head.bias, head, tokens, temperature, teacher, teacher_states, chunk, group
    )
    return logprob, entropy, divergence if teacher is not None else None


class _Fused(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cuda", enabled=False)  # forward and backward must compute the same logits
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, head: Head, tokens: Tensor,
        temperature: float, teacher: Head | None, teacher_states: Tensor | None, chunk: int, group: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        D = len(tokens)
        stats = torch.empty(6, D, dtype=torch.float32, device=states.device)
        for at in range(0, D, chunk):
            part = slice(at, min(at + chunk, D))
            z = _product(states[part], weight, bias)
            z_T = None if teacher is None else _teacher_product(teacher, teacher_states, part)
            reduce_logits(z, z_T, tokens[part], stats[:, part], temperature, head, teacher)
            del z, z_T  # frees their memory before the next chunk
        ctx.save_for_backward(states, weight, bias, tokens, stats, teacher_states)
        ctx.head, ctx.teacher, ctx.temperature, ctx.chunk, ctx.group = head, teacher, temperature, chunk, group
        return stats[0].clone(), stats[1].clone(), stats[2].clone()

    @staticmethod
    @torch.autocast("cuda", enabled=False)
    def backward(ctx: Any, g_logprob: Tensor, g_entropy: Tensor, g_divergence: Tensor) -> Any:
        states, weight, bias, tokens, stats, teacher_states = ctx.saved_tensors
        grads = torch.stack([g_logprob, g_entropy, g_divergence]).float().contiguous()
        d_states = torch.empty_like(states, dtype=weight.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        group = ctx.group * ctx.chunk
        buffer = torch.empty(min(group, len(tokens)), len(weight), dtype=weight.dtype, device=weight.device)
        for start in range(0, len(tokens), group):
            stop = min(start + group, len(tokens))
            for at in range(start, stop, ctx.chunk):
                part = slice(at, min(at + ctx.chunk, stop))
                z = _product(states[part], weight, bias, out=buffer[at - start : part.stop - start])
                z_T = None if ctx.teacher is None else _teacher_product(ctx.teacher, teacher_states, part)
                per_row = tokens[part], stats[:, part], grads[:, part]
                differentiate_logits(z, z_T, *per_row, ctx.temperature, ctx.head, ctx.teacher)
                del z, z_T
            dz, of = buffer[: stop - start], slice(start, stop)
            if d_states is not None:
                torch.mm(dz, weight, out=d_states[of])
            if d_weight is not None:
                d_weight.addmm_(dz.T, states[of].to(dz.dtype))
            if d_bias is not None:
                d_bias += dz.sum(0, dtype=torch.float32)
        d_states = None if d_states is None else d_states.to(states.dtype)
        return d_states, d_weight, d_bias if d_bias is None else d_bias.to(bias.dtype), *[None] * 7


def _product(states: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    states = states.to(weight.dtype)
    return torch.mm(states, weight.T, out=out) if bias is None else torch.addmm(bias, states, weight.T, out=out)


def _teacher_product(teacher: Head, states: Tensor | None, part: slice) -> Tensor:
    assert states is not None
    return _product(states[part].to(teacher.weight.device), teacher.weight, teacher.bias)


def reduce_logits(
    z: Tensor, z_T: Tensor | None, tokens: Tensor, stats: Tensor, temperature: float, head: Head, teacher: Head | None
) -> None:
    """Fill stats [6, n]: log p(a), entropy, divergence, and the log-sum-exps of z, of its shared part, and of z_T."""
    _forward_kernel[(len(z),)](
        z, z if z_T is None else z_T, tokens, stats, stats.stride(0), z.shape[1],
        *_shape(z, z_T, head, teacher, temperature), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def differentiate_logits(
    z: Tensor, z_T: Tensor | None, tokens: Tensor, stats: Tensor, grads: Tensor, temperature: float, head: Head,
    teacher: Head | None,
) -> None:  # fmt: skip
    """Overwrite z with dz; grads [3, n] are the gradients of log p(a), entropy and divergence."""
    _backward_kernel[(len(z),)](
        z, z if z_T is None else z_T, tokens, stats, grads, stats.stride(0), z.shape[1],
        *_shape(z, z_T, head, teacher, temperature), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def _shape(z: Tensor, z_T: Tensor | None, head: Head, teacher: Head | None, temperature: float) -> tuple[Any, ...]:
    shared = 0 if z_T is None else min(z.shape[1], z_T.shape[1])
    return (
        shared,
        0 if z_T is None else z_T.shape[1],
        1.0 / temperature,
        head.scale,
        head.softcap or 0.0,
        1.0 if teacher is None else teacher.scale,
        0.0 if teacher is None else teacher.softcap or 0.0,
    )


@triton.jit
def _finish(x, scale, cap, inverse_temperature):  # type: ignore[no-untyped-def]
    """The steps after the product: scaling, soft cap, temperature."""
    x = x * scale
    if cap > 0:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # cap · tanh(x / cap)
    return x * inverse_temperature


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    z_ptr, t_ptr, token_ptr, stats_ptr, stats_stride, V,
    shared, V_T, inverse_temperature, scale, cap, scale_T, cap_T, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    lane = tl.arange(0, BLOCK)
    # Running maxima and vectors of partial sums relative to them, which are reduced once at the end.
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    m_T = tl.full([BLOCK], -float("inf"), tl.float32)
    s = tl.zeros([BLOCK], tl.float32)  # Σ e^z
    u = tl.zeros([BLOCK], tl.float32)  # Σ e^z z
    s_c = tl.zeros([BLOCK], tl.float32)  # the same over the shared ids
    u_c = tl.zeros([BLOCK], tl.float32)
    w_c = tl.zeros([BLOCK], tl.float32)  # Σ e^z z_T
    s_T = tl.zeros([BLOCK], tl.float32)  # Σ e^z_T over the shared ids
    for start in range(0, V, BLOCK):
        v = start + lane
        x = tl.load(z_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32)
        z = tl.where(v < V, _finish(x, scale, cap, inverse_temperature), -float("inf"))
        m_new = tl.maximum(m, z)
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        shrink = tl.exp(m - safe)
        e = tl.exp(z - safe)
        ez = tl.where(v < V, e * z, 0.0)
        s = s * shrink + e
        u = u * shrink + ez
        if shared > 0:
            both = v < shared
            y = tl.load(t_ptr + row * V_T + v, mask=both, other=0.0).to(tl.float32)
            z_T = tl.where(both, _finish(y, scale_T, cap_T, inverse_temperature), -float("inf"))
            m_T_new = tl.maximum(m_T, z_T)
            safe_T = tl.where(m_T_new == -float("inf"), 0.0, m_T_new)
            s_T = s_T * tl.exp(m_T - safe_T) + tl.exp(z_T - safe_T)
            m_T = m_T_new
            s_c = s_c * shrink + tl.where(both, e, 0.0)
            u_c = u_c * shrink + tl.where(both, ez, 0.0)
            w_c = w_c * shrink + tl.where(both, e * z_T, 0.0)
        m = m_new
    top = tl.max(m, 0)
    lift = tl.exp(m - top)
    total = tl.sum(s * lift, 0)
    lse = top + tl.log(total)
    x = tl.load(z_ptr + row * V + token).to(tl.float32)
    tl.store(stats_ptr + row, _finish(x, scale, cap, inverse_temperature) - lse)
    tl.store(stats_ptr + stats_stride + row, lse - tl.sum(u * lift, 0) / total)
    tl.store(stats_ptr + 3 * stats_stride + row, lse)
    if shared > 0:
        total_c = tl.sum(s_c * lift, 0)
        lse_c = top + tl.log(total_c)
        top_T = tl.max(m_T, 0)
        lse_T = top_T + tl.log(tl.sum(s_T * tl.exp(m_T - top_T), 0))
        kl = tl.sum((u_c - w_c) * lift, 0) / total_c - lse_c + lse_T
        tl.store(stats_ptr + 2 * stats_stride + row, kl)
        tl.store(stats_ptr + 4 * stats_stride + row, lse_c)
        tl.store(stats_ptr + 5 * stats_stride + row, lse_T)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    z_ptr, t_ptr, token_ptr, stats_ptr, grads_ptr, stride, V,
    shared, V_T, inverse_temperature, scale, cap, scale_T, cap_T, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    entropy = tl.load(stats_ptr + stride + row)
    lse = tl.load(stats_ptr + 3 * stride + row)
    g_logprob = tl.load(grads_ptr + row)
    g_entropy = tl.load(grads_ptr + stride + row)
    lane = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        v = start + lane
        inside = v < V
        x = tl.load(z_ptr + row * V + v, mask=inside, other=0.0).to(tl.float32)
        z = _finish(x, scale, cap, inverse_temperature)
        logp = z - lse
        p = tl.exp(logp)
        dz = g_logprob * (tl.where(v == token, 1.0, 0.0) - p) - g_entropy * p * (logp + entropy)
        if shared > 0:
            both = v < shared
            kl = tl.load(stats_ptr + 2 * stride + row)
            lse_c = tl.load(stats_ptr + 4 * stride + row)
            lse_T = tl.load(stats_ptr + 5 * stride + row)
            g_kl = tl.load(grads_ptr + 2 * stride + row)
            y = tl.load(t_ptr + row * V_T + v, mask=both, other=0.0).to(tl.float32)
            logp_T = _finish(y, scale_T, cap_T, inverse_temperature) - lse_T
            logp_c = z - lse_c
            dz += tl.where(both, g_kl * tl.exp(logp_c) * (logp_c - logp_T - kl), 0.0)
        dz = dz * inverse_temperature
        if cap > 0:
            t = z / (inverse_temperature * cap)
            dz = dz * (1 - t * t)
        tl.store(z_ptr + row * V + v, (dz * scale).to(z_ptr.dtype.element_ty), mask=inside)
