"""Keys and values of the running sequences: one slot per sequence, one row per token, and who is in which slot.

A slot keeps its keys and values after its sequence has left, until another takes it. A prompt that starts as any slot
does, in use or free, copies those rows instead of computing them: same ids, same positions, same weights, hence the
same keys and values. Copies cost a memory move, so nothing is shared in place and no slot depends on another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memopd.types import Ids

WORTHWHILE = 16  # tokens; a shorter common start is computed again


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


@dataclass(frozen=True, slots=True)
class Match:
    """Which part of a prompt is in the cache already."""

    slot: int
    ready: int  # tokens of the prompt whose rows can be copied from `slot`
    coming: int  # tokens that a slot being filled in this pass will have


class Slots:
    def __init__(self, count: int, length: int) -> None:
        self.tokens = np.zeros((count, length), np.int32)
        self.ready = np.zeros(count, np.int64)  # rows in the cache
        self.coming = np.zeros(count, np.int64)  # rows after the pass that is being made
        self.free = dict.fromkeys(range(count))  # least recently used first

    def oldest(self, count: int) -> list[int]:
        """The `count` free slots whose content was least recently of use, in the order they lie in memory."""
        return sorted(list(self.free)[:count])

    def match(self, prompt: Ids) -> Match:
        """The longest common start. The last token is always computed: its logits are wanted."""
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

    def take(self, slot: int, prompt: Ids, ready: int) -> None:
        """`prompt` moves in with `ready` rows; the others are there once the pass that computes them is done."""
        del self.free[slot]
        self.tokens[slot, : len(prompt)] = prompt
        self.ready[slot], self.coming[slot] = ready, len(prompt)

    def filled(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.ready[slot] = self.coming[slot]

    def used(self, slot: int) -> None:
        """What a free slot holds was of use again: it is the last to be given away."""
        if slot in self.free:
            del self.free[slot]
            self.free[slot] = None

    def leave(self, slot: int, tokens: Ids) -> None:
        """A sequence is done. Its last token was never read, so it has no row."""
        rows = len(tokens) - 1
        self.tokens[slot, :rows] = tokens[:-1]
        self.ready[slot] = self.coming[slot] = rows
        self.free[slot] = None

    def forget(self) -> None:
        """Other weights: what the slots hold is worth nothing any more, nor is the order in which they were left.

        A resumed run has no such order: with it, the same calls would lie in other slots, and round otherwise.
        """
        self.ready[:] = self.coming[:] = 0
        self.free = dict.fromkeys(sorted(self.free))
