"""Keys and values of the running sequences: one slot per sequence, one row per token, and which slot holds which ids.

A slot keeps its keys and values after its sequence has finished, until another sequence takes it. If a prompt starts
like any slot, used or free, the engine copies those rows instead of computing them: same ids, same positions and same
weights give the same keys and values. A copy only costs a memory move, so slots share no memory and none depends on
another.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd.types import Ids

WORTHWHILE = 16  # tokens; a shorter common prefix is computed again


class Cache:
    """Allocates the tensors of a layer at its first write, so that keys and values may have any shape.

    Takes the memory of `slots + 1` times `length` rows; a CPU commits it only as it is written. No sequence uses the
    last slot: the rows that pad a CUDA graph to its size write there.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots + 1, length
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # [slots, length, Hkv, d] each
        self.special = False  # True once a layer needed plain matrix products

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [T, Hkv, d] at `rows` (slot · length + position); return the layer's whole tensors."""
        if layer not in self.layers:
            self.layers[layer] = (self._make(key), self._make(value))
        keys, values = self.layers[layer]
        keys.view(-1, *key.shape[1:]).index_copy_(0, rows, key)
        values.view(-1, *value.shape[1:]).index_copy_(0, rows, value)
        return keys, values

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy rows to rows in every layer. All rows are read before any is written."""
        for pair in self.layers.values():
            for part in pair:
                flat = part.view(-1, *part.shape[2:])
                flat.index_copy_(0, target, flat.index_select(0, source))

    def clear(self, slot: int, rows: int) -> None:
        """Zero the first rows of a slot. Give only those that were written: a CPU would commit the memory of others."""
        for keys, values in self.layers.values():
            keys[slot, :rows].zero_()
            values[slot, :rows].zero_()

    def release(self) -> None:
        """Free the tensors. The next write allocates them again."""
        self.layers.clear()
        self.special = False

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for pair in self.layers.values() for part in pair)

    def _make(self, like: Tensor) -> Tensor:
        shape = (self.slots, self.length, *like.shape[1:])
        try:
            if like.device.type != "cpu":
                return torch.zeros(shape, dtype=like.dtype, device=like.device)
            return _lazy_zeros(math.prod(shape) * like.element_size()).view(like.dtype).view(shape)
        except (torch.OutOfMemoryError, MemoryError, OSError) as why:
            size = self.slots * self.length
            raise ValueError(
                f"no memory for keys and values of {size:,} tokens per layer: give the engine fewer slots or a smaller "
                f"max_length ({str(why).splitlines()[0]})"
            ) from None


def _lazy_zeros(size: int) -> Tensor:
    """Bytes whose memory the system commits page by page as they are written; torch would commit all at once.

    Zeros, because masked rows are multiplied by 0 and must not be NaN. Small pages, because the first row of a slot
    would commit a huge page, of 2 MB, in every layer. The memory goes back to the system with the tensor.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # not a Unix system
        return torch.from_numpy(np.zeros(size, np.uint8))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a prompt that the cache already holds."""

    slot: int
    ready: int  # tokens of the prompt whose rows can be copied from `slot`
    coming: int  # tokens that some slot will hold after the current pass


class Slots:
    def __init__(self, count: int, length: int) -> None:
        self.tokens = np.zeros((count, length), np.int32)
        self.ready = np.zeros(count, np.int64)  # rows in the cache
        self.coming = np.zeros(count, np.int64)  # rows in the cache after the current pass
        self.free = dict.fromkeys(range(count))  # least recently used first

    def oldest(self, count: int) -> list[int]:
        """The `count` free slots that were used least recently, in the order of their memory."""
        return sorted(list(self.free)[:count])

    def match(self, prompt: Ids) -> Match:
        """The longest common prefix. It excludes the last token, whose logits must be computed."""
        most = len(prompt) - 1
        if most < WORTHWHILE:
            return Match(0, 0, 0)
        alike = np.flatnonzero((self.tokens[:, :WORTHWHILE] == prompt[:WORTHWHILE]).all(1))
        if not len(alike):
            return Match(0, 0, 0)
        same = self.tokens[alike, :most] == prompt[:most]
        common = np.where(same.all(1), most, same.argmin(1))
        ready, coming = np.minimum(common, self.ready[alike]), np.minimum(common, self.coming[alike])
        best = int(ready.argmax())
        found = int(ready[best]) if ready[best] >= WORTHWHILE else 0
        return Match(int(alike[best]), found, int(coming.max()))

    def assign(self, slot: int, prompt: Ids, ready: int) -> None:
        """Give the slot to `prompt`, with `ready` rows. The other rows are ready after the pass that computes them."""
        del self.free[slot]
        self.tokens[slot, : len(prompt)] = prompt
        self.ready[slot], self.coming[slot] = ready, len(prompt)

    def filled(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.ready[slot] = self.coming[slot]

    def mark_used(self, slot: int) -> None:
        """The content of a free slot was reused, so that this slot becomes the last one to be given away."""
        if slot in self.free:
            del self.free[slot]
            self.free[slot] = None

    def release(self, slot: int, tokens: Ids) -> None:
        """Free the slot of a finished sequence. Its last token was never read, so it has no row."""
        rows = len(tokens) - 1
        self.tokens[slot, :rows] = tokens[:-1]
        self.ready[slot] = self.coming[slot] = rows
        self.free[slot] = None

    def invalidate(self) -> None:
        """Drop the content of all slots, because the weights changed, and the order in which they became free.

        A resumed run does not have that order. If it were kept, the same calls would get other slots than in the
        resumed run, and their results would round differently.
        """
        self.ready[:] = self.coming[:] = 0
        self.free = dict.fromkeys(sorted(self.free))
