"""FlexAttention with `(k <= q) & (q < exit[k])`: one compiled kernel for windows, soft caps and sinks, on GPUs.

The block mask comes directly from the integers. The rows that see any row of key block j are exactly the rows from
its first one to the largest exit in it; those that see all of it end at the smallest exit. So two numbers per block
are enough, and nothing of size T × T is ever built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from memopd.compile import Packed
from memopd.models.attention import Layer
from memopd.models.device import to_device

BLOCK = 128
KERNELS = 64  # one per model shape, precision and kind of mask; PyTorch's own limit of 8 would run the rest uncompiled

Mod = Callable[..., Tensor]


def flex_cost(packed: Packed) -> float:
    """The estimated milliseconds per layer, forward + backward, fitted to thin tries, to compare with
    `cascade.paths_cost`."""
    return float(1.2 + 0.082e-6 * (packed.positions.astype("int64") + 1).sum() + 0.4e-3 * len(packed))


class FlexPlan:
    keep: ClassVar[bool] = True

    def __init__(self, packed: Packed, device: torch.device) -> None:
        if device.type == "cpu":
            raise ValueError("flex attention has no backward pass on the CPU: use attention='dense' or 'cascade'")
        # Padding to whole blocks keeps the number of shapes small. A padding row sees only itself, and no other row
        # sees it.
        self.rows = len(packed)
        self.padded = -(-self.rows // BLOCK) * BLOCK
        self.exit = torch.arange(1, self.padded + 1, dtype=torch.int32, device=device)
        self.exit[: self.rows] = to_device(packed.exit, device)
        self.positions = torch.zeros(self.padded, dtype=torch.int32, device=device)
        self.positions[: self.rows] = to_device(packed.positions, device)
        self.longest = int(packed.positions.max()) + 1
        self._masks: dict[int | None, BlockMask] = {}

    def block_mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            with torch.inference_mode(False):  # a later pass over this pack may have a gradient
                limit = None if window is None else torch.tensor(window, device=self.exit.device)
                self._masks[window] = build_block_mask(self.exit, self.positions, limit)
        return self._masks[window]

    @torch.compiler.disable  # compiled separately; a compiled model has a graph break here
    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        window = None if layer.window is None or layer.window >= self.longest else layer.window
        cap = None if layer.softcap is None else _soft_cap(torch.tensor(layer.softcap, device=query.device))
        more = self.padded - self.rows
        if more:
            query, key, value = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (query, key, value))
        with torch._dynamo.config.patch(recompile_limit=KERNELS):
            out, lse = _compiled()(
                query,
                key,
                value,
                score_mod=cap,
                block_mask=self.block_mask(window),
                scale=layer.scale,
                enable_gqa=query.shape[1] != key.shape[1],
                return_lse=True,
            )
        if layer.sinks is not None:  # a sink takes part in the softmax and has no value
            out = out * torch.sigmoid(lse - layer.sinks[None, :, None]).to(out.dtype)[..., None]
        return out[:, :, : self.rows].transpose(1, 2)


def build_block_mask(exit: Tensor, positions: Tensor, window: Tensor | None) -> BlockMask:
    """Which blocks are empty, partial or full, from each block's extreme exits and positions."""
    blocks = len(exit) // BLOCK
    first = torch.arange(blocks, device=exit.device, dtype=torch.int32) * BLOCK
    by_block = exit.view(blocks, BLOCK)
    low, high = by_block.amin(1), by_block.amax(1)  # of key blocks
    q, k = first[:, None], first[None, :]
    some = (k <= q) & (q < high[None])
    full = (k < q) & (q + BLOCK <= low[None])
    if window is not None:
        depth = positions.view(blocks, BLOCK)
        shallow, deep = depth.amin(1), depth.amax(1)
        some &= shallow[:, None] - deep[None] < window
        full &= deep[:, None] - shallow[None] < window
    partial = some & ~full
    return BlockMask.from_kv_blocks(
        *_lists(partial),
        *_lists(full & some),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visible(exit) if window is None else _visible_within(exit, positions, window),
        seq_lengths=(len(exit), len(exit)),
    )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks: the number of blocks that are set, and all blocks with these first."""
    count = blocks.sum(1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None].contiguous()


# Closures over tensors, never over Python numbers: a new number would compile a new kernel for every pack.


def _visible(exit: Tensor) -> Mod:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < exit[k])

    return mask_mod


def _visible_within(exit: Tensor, positions: Tensor, window: Tensor) -> Mod:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < exit[k]) & (positions[q] - positions[k] < window)

    return mask_mod


def _soft_cap(cap: Tensor) -> Mod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return score_mod


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)  # fullgraph: fail rather than run uncompiled
