"""Attention of one forward pass of the engine: new tokens of many sequences in one flat row, their past in the cache.

A Pass is the scheme that the model gets (memopd.models.attention). It first writes new keys and values to the cache;
then the new tokens of every sequence read their own slot, up to themselves.

Three implementations give the same result: PyTorch's kernel on a CPU, the kernel of `kernel.py` on a GPU, and plain
matrix products for layers with a window, a soft cap or sinks, and wherever neither kernel applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memopd.engine.local.cache import Cache
from memopd.models.attention import Layer, eval_mode, own_attention, plain_attention, sampling_attention
from memopd.models.support import sharing

# Another call of PyTorch's CPU kernel costs as much as reading this many keys, so sequences of nearly equal length
# share a call.
CALL_COST = 150

TILE_QUERIES = 64  # of a tile on a GPU: tokens × heads of a group

CLOSE = 0.1  # of the logits' spread: rounding is far below it in every precision, a layer that we misread far above


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence: `count` tokens from index `first` of the flat row."""

    slot: int
    first: int
    count: int
    position: int  # of the first

    @property
    def length(self) -> int:
        """The number of keys that the last token sees."""
        return self.position + self.count


def tile_size(groups: int) -> int:
    """How many tokens a tile of the GPU's kernel has, with `groups` query heads for each key-value head."""
    return max(1, TILE_QUERIES // groups)


def pieces_of(spans: Sequence[Span], size: int, length: int) -> np.ndarray[Any, Any]:
    """The spans in tiles of at most `size` tokens: four rows, the fields of kernel.Tiles."""
    pieces = [
        (s.first + at, min(size, s.count - at), s.slot * length, s.position + at)
        for s in spans
        for at in range(0, s.count, size)
    ]
    return np.array(pieces, np.int64).T.copy()


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences in neighbouring slots with one new token each, which one call of the kernel serves."""

    slot: int
    first: int
    count: int
    length: int  # of the longest
    mask: Tensor | None  # [count, 1, 1, length]: hides the keys past the ends of the shorter sequences


@dataclass(slots=True)
class Pass:
    """The cache rows that one call of the model reads and writes. A row is slot · length + position."""

    cache: Cache
    rows: Tensor  # [T] where the new keys and values are written
    spans: Sequence[Span]
    groups: Sequence[Group] = ()  # on a CPU: the spans that share a call of the kernel
    alone: Sequence[Span] = ()  # on a CPU: the spans that have a call of their own
    tiles: Any = None  # on a GPU (kernel.py); made from the spans if None
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, d]
        return self._read(q, *self.cache.write(layer.index, self.rows, k, v), layer)[None]

    def _read(self, query: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        """query [T, Hq, d], keys and values of all slots -> [T, Hq, dv]"""
        if layer.window is not None and layer.window >= self.cache.length:
            layer = replace(layer, window=None)
        extras = (layer.window, layer.softcap, layer.sinks)
        special = any(x is not None for x in extras) or keys.dtype == torch.float64
        if (query.is_cuda or self.tiles is not None) and not special:
            if self.tiles is None:
                from memopd.engine.local.kernel import tiles_of  # imports Triton, which exists only with a GPU

                self.tiles = tiles_of(self.spans, query.shape[1] // keys.shape[2], self.cache.length, query.device)
            return self.tiles.attend(query, keys, values, layer.scale)
        self.cache.special |= special
        assert self.spans, "a captured pass has no spans"
        out = query.new_empty(*query.shape[:2], values.shape[3])
        if special or query.device.type != "cpu":
            for span in self.spans:
                here = slice(span.first, span.first + span.count)
                past = keys[span.slot, : span.length], values[span.slot, : span.length]
                out[here] = plain(query[here], *past, span.position, layer)
            return out
        for group in self.groups:
            _attend_group(group, query, keys, values, layer.scale, out)
        for span in self.alone:
            _attend_span(span, self._mask(span, query), query, keys, values, layer.scale, out)
        return out

    def _mask(self, span: Span, query: Tensor) -> Tensor | None:
        """For several new tokens that follow cached ones: the kernel's own causal mask would begin at the first key."""
        if span.position == 0 or span.count == 1:
            return None
        shape = (span.count, span.length)
        if shape not in self.masks:
            hidden = torch.full(shape, -torch.inf, dtype=query.dtype, device=query.device)
            self.masks[shape] = hidden.triu_(span.position + 1)
        return self.masks[shape]


def _attend_group(group: Group, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """One new token per sequence: the query heads of a group act as several queries, so no key is repeated."""
    n, heads, d = group.count, query.shape[1], query.shape[2]
    here, slots = slice(group.first, group.first + n), slice(group.slot, group.slot + n)
    q = query[here].reshape(n, keys.shape[2], -1, d)
    k, v = (x[slots, : group.length].transpose(1, 2) for x in (keys, values))
    made = scaled_dot_product_attention(q, k, v, group.mask, scale=scale)
    out[here] = made.reshape(n, heads, -1)


def _attend_span(
    span: Span, mask: Tensor | None, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor
) -> None:
    """Several new tokens of one sequence: the key-value heads are the batch, so no key is repeated."""
    here, groups = slice(span.first, span.first + span.count), query.shape[1] // keys.shape[2]
    q = query[here].transpose(0, 1).unflatten(0, (-1, groups))  # [Hkv, G, n, d]
    k, v = (x[span.slot, : span.length].transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (keys, values))
    causal = mask is None and span.count > 1
    made = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    out[here] = made.flatten(0, 1).transpose(0, 1)


def plain(query: Tensor, key: Tensor, value: Tensor, position: int, layer: Layer) -> Tensor:
    """query [n, Hq, d] from `position` on, key and value [length, Hkv, d] of one sequence -> [n, Hq, dv]"""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    back = torch.arange(position, position + len(query), device=q.device)[:, None]
    back = back - torch.arange(len(key), device=q.device)  # the distance from each query back to each key
    visible = back >= 0 if layer.window is None else (back >= 0) & (back < layer.window)
    return plain_attention(q, k, v, visible, layer).transpose(0, 1)


# ---- which sequences share a call of the kernel --------------------------------------------------------------------


@dataclass(slots=True)
class Groups:
    """The grouping of sequences that each get one token per step.

    It stays valid for as long as the same sequences run: all of them grow by one token, so the masked width past the
    end of a shorter one does not change.
    """

    runs: list[tuple[int, int]]  # the sequences a .. b - 1, which are in neighbouring slots
    masks: list[Tensor | None]  # [b - a, room]: 0, and -inf at the end of the rows of shorter sequences

    def at(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Group]:
        groups = []
        for (a, b), mask in zip(self.runs, self.masks, strict=True):
            longest = max(lengths[a:b])
            here = None if mask is None else mask[:, None, None, mask.shape[1] - longest :]
            groups.append(Group(slots[a], a, b - a, longest, here))
        return groups


def group(slots: Sequence[int], lengths: Sequence[int], room: int, dtype: torch.dtype) -> Groups:
    """Neighbouring slots share a call if reading past the ends of the shorter ones costs less than another call."""
    runs: list[tuple[int, int]] = []
    for i, length in enumerate(lengths):
        if runs and slots[i] == slots[i - 1] + 1:
            a = runs[-1][0]
            within = lengths[a : i + 1]
            before = (i - a) * max(lengths[a:i])
            if (i + 1 - a) * max(within) <= before + length + CALL_COST:
                runs[-1] = (a, i + 1)
                continue
        runs.append((i, i + 1))
    masks: list[Tensor | None] = []
    for a, b in runs:
        short = max(lengths[a:b]) - np.asarray(lengths[a:b])
        if not short.any():
            masks.append(None)
            continue
        mask = torch.zeros(b - a, room, dtype=dtype)
        for row, width in zip(mask, short.tolist(), strict=True):
            row[room - width :] = -torch.inf
        masks.append(mask)
    return Groups(runs, masks)


# ---- which models the engine can sample from -----------------------------------------------------------------------


def check_model(model: Any) -> None:
    """Raise an error for a model from which the engine would sample wrongly."""
    if not (can := sharing(model)).shared:
        raise ValueError(f"{can.reason}: the local engine cannot sample from it; serve it with vLLM")
    expected, logits = _compare(model)
    off = (logits.double() - expected.double()).square().mean().sqrt() / expected.double().std()
    if off > CLOSE:  # NaN weights pass here: the first sampled token reports them
        raise ValueError(
            f"{type(model).__name__} does more around its attention than the local engine supports (logits off by "
            f"{off:.0%} of their spread): serve it with vLLM"
        )


def _compare(model: Any) -> tuple[Tensor, Tensor]:
    """The last logits of a prompt: from the model by itself, and from the engine, which reads it in three parts.

    Model families differ in what they do around their attention. This check keeps the engine from sampling wrongly,
    without an error, from a family that is new to it.
    """
    device = next(model.parameters()).device
    ids = torch.arange(24, device=device) * 7 % min(101, model.get_input_embeddings().weight.shape[0])
    cache, logits = Cache(1, 24), None
    with sampling_attention(model):
        for a, b in ((0, 16), (16, 23), (23, 24)):
            rows, span = torch.arange(a, b, device=device), Span(slot=0, first=0, count=b - a, position=a)
            logits = model(
                input_ids=ids[None, a:b],
                position_ids=rows[None],
                attention_mask=None,
                use_cache=False,
                memopd_scheme=Pass(cache, rows, spans=[span], alone=[span]),
            ).logits[0, -1]
    assert logits is not None
    with own_attention(model), eval_mode(model), torch.inference_mode():
        return model(input_ids=ids[None], use_cache=False).logits[0, -1], logits
