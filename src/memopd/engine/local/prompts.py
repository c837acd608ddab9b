"""Passes on a GPU in which prompts enter, captured as CUDA graphs: one graph per number of rows, rounded up.

Launched kernel by kernel, such a pass takes the host longer than the GPU computes, and every running sequence waits for
it. The rows that fill a pass up write to the slot that no sequence uses, and no tile reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.engine.local.attention import Pass, pieces_of, tile_size
from memopd.engine.local.cache import Cache
from memopd.engine.local.sequence import FlatRow
from memopd.models.attention import Scheme
from memopd.models.compiled import Opaque

SMALLEST = 64  # rows of a graph

Capture = Callable[[Callable[[], None]], torch.cuda.CUDAGraph]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one graph's inputs."""

    rows: int
    slots: int
    tile: int  # tokens per tile, at most

    @property
    def tiles(self) -> int:
        return self.rows // self.tile + self.slots  # at most one tile of every sequence is not full

    @property
    def sizes(self) -> list[int]:
        return [self.rows] * 3 + [self.slots] + [self.tiles] * 4


@dataclass(frozen=True, slots=True)
class Captured:
    shape: Shape
    inputs: Tensor
    graph: torch.cuda.CUDAGraph


def rounded(rows: int) -> int:
    """The next power of two, or the half between two of them.

    >>> [rounded(n) for n in (3, 64, 65, 96, 97, 1100)]
    [64, 64, 96, 96, 128, 1536]
    """
    size = max(SMALLEST, 1 << (rows - 1).bit_length())
    return size * 3 // 4 if rows <= size * 3 // 4 and size > SMALLEST else size


def inputs_of(row: FlatRow, shape: Shape, length: int, unused: int) -> np.ndarray[Any, Any]:
    """All inputs of a pass in one array, so that one copy brings them to the device. `unused`: a row of the cache."""
    first, count, start, position = pieces_of([*row.running, *row.entering], shape.tile, length)
    parts = (row.ids, row.positions, row.places, row.last, first, count, start, position)
    fill = (0, 0, unused, 0, 0, 0, 0, 0)
    padded = [
        np.pad(part, (0, size - len(part)), constant_values=value)
        for part, size, value in zip(parts, shape.sizes, fill, strict=True)
    ]
    return np.concatenate(padded)


class PromptGraphs:
    def __init__(self, model: Any, cache: Cache, capture: Capture, fused: bool) -> None:
        self.model, self.cache, self.capture, self.fused = model, cache, capture, fused
        keys = next(iter(cache.layers.values()))[0]
        heads = getattr(model.config.get_text_config(), "num_attention_heads", keys.shape[2])
        self.tile = tile_size(max(1, heads // keys.shape[2]))
        self.graphs: dict[int, Captured] = {}
        self.logits: Tensor | None = None  # of the last pass

    def run(self, row: FlatRow) -> Tensor:
        """The logits that follow every sequence of `row`, valid until the next pass."""
        size = rounded(len(row.ids))
        shape = Shape(size, self.cache.slots - 1, self.tile)
        values = torch.from_numpy(inputs_of(row, shape, self.cache.length, shape.slots * self.cache.length))
        if size not in self.graphs:
            inputs = values.to(next(self.model.parameters()).device)
            self.graphs[size] = Captured(shape, inputs, self.capture(lambda: self._pass(shape, inputs)))
        found = self.graphs[size]
        found.inputs.copy_(values)
        found.graph.replay()
        assert self.logits is not None
        return self.logits[: len(row.last)]

    def _pass(self, shape: Shape, inputs: Tensor) -> None:
        from memopd.engine.local.kernel import Tiles  # imports Triton, which exists only with a GPU

        ids, positions, places, last, first, count, start, position = inputs.split(shape.sizes)
        tiles = Tiles(first, count, start, position, shape.tile)
        now: Scheme = Pass(self.cache, places, spans=(), tiles=tiles)
        logits = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=last,
            memopd_scheme=Opaque(now) if self.fused else now,
        ).logits[0]
        if self.logits is None:
            self.logits = torch.empty_like(logits)  # outside the graphs: the first call is not captured
        self.logits.copy_(logits)
