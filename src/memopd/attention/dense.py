"""The reference kernel: one boolean matrix from `exit`, passed to PyTorch's own attention.

It is quadratic in rows, so it is for tests, audits and short packs. Soft caps and sinks use a plain matmul and softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memopd.compile import Packed
from memopd.models.attention import Layer, plain_attention


def visible(exit: Tensor) -> Tensor:
    """[T, T] bool: row q sees row k ⟺ k <= q < exit[k]."""
    row = torch.arange(len(exit), device=exit.device)
    return (row[None, :] <= row[:, None]) & (row[:, None] < exit[None, :])


KEPT = 4096  # rows: a mask of up to 16 MB stays with its pack


class DensePlan:
    def __init__(self, packed: Packed, device: torch.device) -> None:
        self.keep = len(packed) <= KEPT
        self.positions = torch.as_tensor(packed.positions, device=device)
        self.longest = int(packed.positions.max()) + 1
        self.mask = visible(torch.as_tensor(packed.exit, device=device))
        self._windowed: dict[int, Tensor] = {}

    def within(self, window: int | None) -> Tensor:
        """The mask of a layer with a sliding window: only ancestors less than `window` positions back."""
        if window is None or window >= self.longest:
            return self.mask
        if window not in self._windowed:
            with torch.inference_mode(False):  # a later pass over this pack may have a gradient
                near = self.positions[:, None] - self.positions[None, :] < window
                self._windowed[window] = self.mask & near
        return self._windowed[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        mask = self.within(layer.window)
        groups = query.shape[1] // key.shape[1]
        if layer.softcap is None and layer.sinks is None:
            if query.is_cuda and groups > 1:  # with a mask, only the slow kernel takes grouped queries
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out = scaled_dot_product_attention(query, key, value, mask, scale=layer.scale, enable_gqa=groups > 1)
            return out.transpose(1, 2)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return plain_attention(query, key, value, mask, layer).transpose(1, 2)
