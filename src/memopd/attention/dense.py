"""The reference kernel: one boolean matrix from `exit`, through PyTorch's own attention.

Quadratic in rows, so for tests, audits and short packs; soft caps and sinks in plain matmul and softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from memopd.compile import Packed


def visible(exit: Tensor) -> Tensor:
    """[T, T] bool: row q sees row k ⟺ k <= q < exit[k]."""
    row = torch.arange(len(exit), device=exit.device)
    return (row[None, :] <= row[:, None]) & (row[:, None] < exit[None, :])


class DensePlan:
    name = "dense"

    def __init__(self, packed: Packed, device: torch.device) -> None:
        self.positions = torch.as_tensor(packed.positions, device=device)
        self.longest = int(packed.positions.max()) + 1
        self.mask = visible(torch.as_tensor(packed.exit, device=device))
        self._windowed: dict[int, Tensor] = {}

    def within(self, window: int | None) -> Tensor:
        """The mask of a layer with a sliding window: only ancestors less than `window` positions back."""
        if window is None or window >= self.longest:
            return self.mask
        if window not in self._windowed:
            near = self.positions[:, None] - self.positions[None, :] < window
            self._windowed[window] = self.mask & near
        return self._windowed[window]

    def attend(
        self,
        query: Tensor,  # [1, Hq, T, d]
        key: Tensor,  # [1, Hkv, T, d]
        value: Tensor,  # [1, Hkv, T, d]
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,  # [Hq]
    ) -> Tensor:  # [1, T, Hq, d]
        mask = self.within(window)
        groups = query.shape[1] // key.shape[1]
        if softcap is None and sinks is None:
            if query.is_cuda and groups > 1:  # with a mask, only the slow kernel takes grouped queries
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)
            return out.transpose(1, 2)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        precise = torch.promote_types(query.dtype, torch.float32)
        weights = softmax(scores, dim=-1, dtype=precise).to(query.dtype)
        if sinks is not None:
            weights = weights[..., :-1]  # the sink takes its share and gives nothing
        return (weights @ value).transpose(1, 2)
