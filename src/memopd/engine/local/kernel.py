"""Attention on a GPU: the queries of many sequences, each reading its own slot of the cache, in one launch.

A tile is a few neighbouring new tokens of one sequence. A program handles one tile and one key-value head, with all
query heads of that group at once, and loops over the slot's keys up to the tile's last token. Sequences of any length,
with one new token or a whole prompt, use the same kernel. It needs no padding, and it reads lengths on the device, so
that a captured graph works for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from memopd.engine.local.attention import Span, pieces_of, tile_size

BLOCK = 16384  # bytes of keys read at once, so that wide heads in float32 still fit a small GPU's shared memory

# A sequence with one new token waits for its keys: it reads more of them at once, and more ahead, where shared memory
# has room. On an H200 with 14 heads of 64, a step of one sequence of 700 keys takes 8.2 µs per layer instead of 11.0,
# and of 128 such sequences 12.1 instead of 18.5.
KEYS, STAGES, ROOM = 128, 3, 8 * BLOCK


@dataclass(frozen=True, slots=True)
class Tiles:
    first: Tensor  # [tiles] the tile's first token in the flat row
    count: Tensor  # [tiles] its tokens; 0: nothing to do
    start: Tensor  # [tiles] int64, the first row of its slot in the cache
    position: Tensor  # [tiles] int64, of its first token
    tokens: int  # the most tokens in a tile

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        heads, d = query.shape[1:]
        groups, width = heads // keys.shape[2], values.shape[3]
        out = torch.empty(len(query), heads, width, dtype=query.dtype, device=query.device)
        query = query if query.stride(2) == 1 else query.contiguous()
        wide = max(16, triton.next_power_of_2(max(d, width)))
        alone = self.tokens == 1 and _shared_memory(query.device) >= ROOM
        _attend[(len(self.first), keys.shape[2])](
            query, keys, values, out, self.first, self.count, self.start, self.position, scale,
            query.stride(0), query.stride(1), keys.stride(1), values.stride(1), out.stride(0),
            G=groups, D=d, DV=width, DP=wide, M=max(16, triton.next_power_of_2(self.tokens * groups)),
            N=min(KEYS if alone else 64, max(16, BLOCK // (wide * keys.element_size()))),
            num_stages=STAGES if alone else 2,
        )  # fmt: skip
        return out


@cache
def _shared_memory(device: torch.device) -> int:
    """The most bytes that a program can have; AMD's properties do not say."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def tiles_of(spans: Sequence[Span], groups: int, length: int, device: torch.device) -> Tiles:
    """The tiles of a pass."""
    size = 1 if all(s.count == 1 for s in spans) else tile_size(groups)
    first, count, start, position = torch.as_tensor(pieces_of(spans, size, length), device=device)
    return Tiles(first.int(), count.int(), start, position, size)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, out, tile_first, tile_count, tile_start, tile_position, scale,
    query_t, query_h, key_row, value_row, out_t,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tile_count + tile)
    if count == 0:
        return
    first, start, position = tl.load(tile_first + tile), tl.load(tile_start + tile), tl.load(tile_position + tile)
    m, d = tl.arange(0, M), tl.arange(0, DP)
    token, here = m // G, m // G < count
    q_at = (first + token)[:, None] * query_t + (head * G + m % G)[:, None] * query_h + d[None, :]
    q = tl.load(query + q_at, mask=here[:, None] & (d < D)[None, :], other=0.0)

    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, DP], tl.float32)
    length = position + count
    for at in range(0, length, N):
        n = at + tl.arange(0, N)
        k_at = (start + n)[:, None] * key_row + head * D + d[None, :]
        k = tl.load(key + k_at, mask=(n < length)[:, None] & (d < D)[None, :], other=0.0)
        # "ieee": multiply float32 in float32, not in the tensor cores' 10-bit mode.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # Every token sees key 0, so that `most` is finite after the first block.
        scores = tl.where(n[None, :] <= (position + token)[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights, fade = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
        v_at = (start + n)[:, None] * value_row + head * DV + d[None, :]
        v = tl.load(value + v_at, mask=(n < length)[:, None] & (d < DV)[None, :], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        most = higher
    o_at = (first + token)[:, None] * out_t + (head * G + m % G)[:, None] * DV + d[None, :]
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_at, result, mask=here[:, None] & (d < DV)[None, :])
