"""Keys and values: one slot a sequence, one row a token, every layer its own two tensors."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class Cache:
    """A layer's tensors are made when it first writes, so that any shape of keys and values will do.

    Memory of `slots + 1` times `length` rows; a CPU commits it only as it is written. The last slot belongs to nobody:
    rows that fill a CUDA graph up to its size write there.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots + 1, length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # [slots, length, Hkv, d] each
        self.special = False  # a layer was seen that only plain products serve

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [T, Hkv, d] at `rows` (slot · length + position); the layer's whole tensors come back."""
        if layer not in self.layers:
            self.layers[layer] = (self._make(key), self._make(value))
        keys, values = self.layers[layer]
        keys.view(-1, *key.shape[1:]).index_copy_(0, rows, key)
        values.view(-1, *value.shape[1:]).index_copy_(0, rows, value)
        return keys, values

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Rows to rows, every layer. All are read before any is written."""
        for pair in self.layers.values():
            for part in pair:
                flat = part.view(-1, *part.shape[2:])
                flat.index_copy_(0, target, flat.index_select(0, source))

    def clear(self, slot: int) -> None:
        for keys, values in self.layers.values():
            keys[slot].zero_()
            values[slot].zero_()

    def _make(self, like: Tensor) -> Tensor:
        shape = (self.slots, self.length, *like.shape[1:])
        try:
            if like.device.type != "cpu":
                return torch.zeros(shape, dtype=like.dtype, device=like.device)
            # Zeros, as hidden rows are multiplied by 0 and must not be NaN; NumPy's, as torch would commit the memory.
            bytes = np.zeros(math.prod(shape) * like.element_size(), np.uint8)
            return torch.from_numpy(bytes).view(like.dtype).view(shape)
        except (torch.OutOfMemoryError, MemoryError) as why:
            size = self.slots * self.length
            raise ValueError(
                f"no memory for keys and values of {size:,} tokens a layer: give the engine fewer slots or a smaller "
                f"max_length ({str(why).splitlines()[0]})"
            ) from None
