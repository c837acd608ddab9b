"""Attention over segments of different lengths: many (queries, keys) pairs in one call, forward and backward.

    segment s:  queries q[q_start[s] : q_stop[s]]  against keys k[k_start[s] : k_stop[s]]

Causal segments are aligned at the end: the last query sees every key. `forward` returns the output and the
log-sum-exp of the scores. `backward` takes both as *arguments*, so that a caller who merged the results of several
segments can pass the merged ones; the parts then sum to the gradient of the whole.

Each device and precision has one primitive: FlashAttention on GPUs in half precision, the memory-efficient kernel
on GPUs in float32, and PyTorch's CPU flash kernel, segment by segment, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd.models.device import to_device

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Segments:
    """All fields are tensors, because a Python number would make a compiled model compile again for every pack."""

    cu_q: Tensor  # [S + 1] int32, where segments start and stop in q
    cu_k: Tensor  # [S + 1] int32, in k
    shape: Tensor  # on the CPU: longest segment in q, in k, and whether causal

    @classmethod
    def of(cls, q: NDArray[Any], k: NDArray[Any], causal: bool, device: torch.device) -> Segments:
        """Built from the number of queries and keys of every segment. None may be empty: a kernel may crash on one."""
        assert len(q) == len(k) > 0
        assert (np.minimum(q, k) > 0).all()
        assert not causal or (q <= k).all()
        cu_q, cu_k = (to_device(np.cumsum([0, *n]), device, torch.int32) for n in (q, k))
        return cls(cu_q, cu_k, torch.tensor([int(q.max()), int(k.max()), int(causal)]))


def check_supported(query: Tensor, value: Tensor, window: int | None) -> None:
    """Raise an error that names the alternative if there is no kernel for these tensors."""
    d = query.shape[-1]
    if value.shape[-1] != d:
        raise ValueError("cascade attention needs values as wide as keys: use attention='dense'")
    if query.is_cuda and query.dtype == torch.float64:
        raise ValueError("cascade attention has no float64 kernel on a GPU: use attention='dense'")
    if query.is_cuda and query.dtype != torch.float32 and (d % 8 or d > 256):
        raise ValueError(f"cascade attention needs a head dimension of 8, 16, ... 256, got {d}: use attention='flex'")
    if query.is_cuda and query.dtype == torch.float32 and window is not None:
        raise ValueError("cascade attention has no float32 kernel for sliding windows: use attention='flex'")


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """q [Tq, Hq, d], k and v [Tk, Hkv, d] -> out [Tq, Hq, d], log-sum-exp [Hq, Tq] in at least float32."""
    if not q.is_cuda:
        return _cpu_forward(q, k, v, segments, scale, window)
    if q.dtype == torch.float32:
        return _efficient_forward(q, k, v, segments, scale)
    max_q, max_k, causal = segments.shape.tolist()
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        segments.cu_q,
        segments.cu_k,
        max_q,
        max_k,
        0.0,
        bool(causal),
        False,
        scale=scale,
        **_window(window),
    )
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), where `out` and `lse` may belong to a larger whole that contains these segments."""
    if not q.is_cuda:
        return _cpu_backward(grad, q, k, v, out, lse, segments, scale, window)
    if q.dtype == torch.float32:
        return _efficient_backward(grad, q, k, v, out, lse, segments, scale)
    max_q, max_k, causal = segments.shape.tolist()
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the random state of dropout, which is 0
    dq, dk, dv = aten._flash_attention_backward(
        grad, q, k, v, out, lse, segments.cu_q, segments.cu_k, max_q, max_k, 0.0, bool(causal), unused, unused,
        scale=scale, **_window(window),
    )  # fmt: skip
    return dq, dk, dv


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


# ---- CPU: one segment at a time ---------------------------------------------------------------------------------


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for (qa, qb, ka, kb), options in _cpu_segments(segments, q, window):
        o, part = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q[qa:qb]), _heads(k[ka:kb]), _heads(v[ka:kb]), scale=scale, **options
        )
        out[qa:qb] = o[0].transpose(0, 1)
        lse[:, qa:qb] = part[0]
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    segments: Segments, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for (qa, qb, ka, kb), options in _cpu_segments(segments, q, window):
        parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(grad[qa:qb]), _heads(q[qa:qb]), _heads(k[ka:kb]), _heads(v[ka:kb]), _heads(out[qa:qb]),
            lse[None, :, qa:qb].contiguous(), 0.0, scale=scale, **options,
        )  # fmt: skip
        dq[qa:qb], dk[ka:kb], dv[ka:kb] = (part[0].transpose(0, 1) for part in parts)
    return dq, dk, dv


def _cpu_segments(
    segments: Segments, q: Tensor, window: int | None
) -> Iterator[tuple[tuple[int, int, int, int], dict[str, Any]]]:
    """Bounds and mask of every segment. The kernel's own causal mask is aligned at the start and has no window; if a
    segment needs another one, the mask is an explicit tensor."""
    causal = bool(segments.shape[2])
    cu_q, cu_k = segments.cu_q.tolist(), segments.cu_k.tolist()
    for bounds in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        queries, keys = bounds[1] - bounds[0], bounds[3] - bounds[2]
        if not causal or (queries == keys and (window is None or window >= keys)):
            yield bounds, {"is_causal": causal}
            continue
        back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)  # the distance back to each key
        hidden = (back < 0) | (back >= (window or keys + 1))
        mask = torch.zeros(queries, keys, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        yield bounds, {"is_causal": False, "attn_mask": mask}


def _heads(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # [T, H, d] -> [1, H, T, d]


# ---- GPU, float32: the memory-efficient kernel, one key-value head at a time ------------------------------------
# It has no grouped queries, but takes any stride: all query heads of a group read one key head, without a copy.

_BOTTOM_RIGHT = 2  # its code for a causal mask that is aligned at the end


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    max_q, max_k, causal = segments.shape.tolist()
    for qh, kh, vh in _groups(q, k, v):
        out, lse, *_ = aten._efficient_attention_forward(
            qh,
            kh,
            vh,
            None,
            segments.cu_q,
            segments.cu_k,
            max_q,
            max_k,
            0.0,
            _BOTTOM_RIGHT * causal,
            True,
            scale=scale,
        )
        outs.append(out[0])
        lses.append(_from_padded(lse, segments))
    return torch.cat(outs, 1), torch.cat(lses, 0)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    max_q, max_k, causal = segments.shape.tolist()
    dqs, dks, dvs = [], [], []
    for i, (qh, kh, vh) in enumerate(_groups(q, k, v)):
        heads = slice(i * groups, (i + 1) * groups)
        dq, dk, dv, _ = aten._efficient_attention_backward(
            grad[None, :, heads].contiguous(), qh, kh, vh, None, out[None, :, heads].contiguous(),
            segments.cu_q, segments.cu_k, max_q, max_k, _to_padded(lse[heads], segments), 0.0,
            seed, seed, _BOTTOM_RIGHT * causal, False, scale=scale,
        )  # fmt: skip
        dqs.append(dq[0])
        dks.append(dk[0].sum(1, keepdim=True))
        dvs.append(dv[0].sum(1, keepdim=True))
    return torch.cat(dqs, 1), torch.cat(dks, 1), torch.cat(dvs, 1)


def _groups(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    groups = q.shape[1] // k.shape[1]
    for i in range(k.shape[1]):
        qh = q[None, :, i * groups : (i + 1) * groups]
        yield (
            qh,
            k[None, :, i : i + 1].expand(-1, -1, groups, -1),
            v[None, :, i : i + 1].expand(-1, -1, groups, -1),
        )


def _slots(segments: Segments) -> tuple[Tensor, Tensor]:
    """Segment and place of every query: this kernel stores log-sum-exps as [S, H, longest], padded to 32."""
    lengths = segments.cu_q.diff().long()
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return segment, torch.arange(len(segment), device=lengths.device) - segments.cu_q[:-1].long()[segment]


def _from_padded(lse: Tensor, segments: Segments) -> Tensor:
    segment, place = _slots(segments)
    return lse[segment, :, place].T.contiguous()


def _to_padded(lse: Tensor, segments: Segments) -> Tensor:
    segment, place = _slots(segments)
    longest = -(-int(segments.shape[0]) // 32) * 32
    padded = lse.new_full((len(segments.cu_q) - 1, lse.shape[0], longest), float("inf"))
    padded[segment, :, place] = lse.T
    return padded
