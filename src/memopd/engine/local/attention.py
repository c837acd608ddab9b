"""How one forward pass of the engine attends: new tokens of many sequences in one flat row, their past in the cache.

A Pass is the scheme that the model gets (memopd.models.attention). New keys and values go into the cache first; then
every sequence's new tokens read its own slot, up to themselves.

Three ways to read, one result: PyTorch's kernel on a CPU, the kernel of `kernel.py` on a GPU, and plain products where
a layer has a window, a soft cap or sinks, or where neither kernel serves.
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

# Keys whose reading costs as much as another call of PyTorch's CPU kernel: sequences of nearly equal length share one.
CALL_COST = 150

CLOSE = 0.1  # of the logits' spread: rounding is far below in every precision, a misread layer far above


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence: `count` of them from place `first` of the flat row."""

    slot: int
    first: int
    count: int
    position: int  # of the first

    @property
    def length(self) -> int:
        """Keys that the last of them sees."""
        return self.position + self.count


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences in neighbouring slots with one new token each, read by one call."""

    slot: int
    first: int
    count: int
    length: int  # of the longest
    mask: Tensor | None  # [count, 1, 1, length]: hides what lies past the shorter ones' ends


@dataclass(slots=True)
class Pass:
    """What one call of the model reads and writes. Rows are slot · length + position."""

    cache: Cache
    rows: Tensor  # [T] where the new keys and values go
    spans: Sequence[Span]
    groups: Sequence[Group] = ()  # of the spans, those served by common calls; the CPU's way
    alone: Sequence[Span] = ()  # and those that are not
    tiles: Any = None  # the GPU's way (kernel.py); made from the spans where none is given
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, d]
        return self._read(q, *self.cache.write(layer.index, self.rows, k, v), layer)[None]

    def _read(self, query: Tensor, keys: Tensor, values: Tensor, layer: Layer) -> Tensor:
        """query [T, Hq, d], keys and values of all slots -> [T, Hq, dv]"""
        if layer.window is not None and layer.window >= self.cache.length:
            layer = replace(layer, window=None)
        asked = (layer.window, layer.softcap, layer.sinks)
        special = any(x is not None for x in asked) or keys.dtype == torch.float64
        if (query.is_cuda or self.tiles is not None) and not special:
            if self.tiles is None:
                from memopd.engine.local.kernel import tiles_of  # not where there is no GPU

                self.tiles = tiles_of(self.spans, query.shape[1] // keys.shape[2], self.cache.length, query.device)
            return self.tiles.attend(query, keys, values, layer.scale)
        self.cache.special |= special
        assert self.spans, "a captured pass knows no spans"
        out = query.new_empty(*query.shape[:2], values.shape[3])
        if special or query.device.type != "cpu":
            for span in self.spans:
                here = slice(span.first, span.first + span.count)
                past = keys[span.slot, : span.length], values[span.slot, : span.length]
                out[here] = plain(query[here], *past, span.position, layer)
            return out
        for group in self.groups:
            _together(group, query, keys, values, layer.scale, out)
        for span in self.alone:
            _alone(span, self._mask(span, query), query, keys, values, layer.scale, out)
        return out

    def _mask(self, span: Span, query: Tensor) -> Tensor | None:
        """For several new tokens after a past: the kernel's own causal mask would begin at the first key."""
        if span.position == 0 or span.count == 1:
            return None
        shape = (span.count, span.length)
        if shape not in self.masks:
            hidden = torch.full(shape, -torch.inf, dtype=query.dtype, device=query.device)
            self.masks[shape] = hidden.triu_(span.position + 1)
        return self.masks[shape]


def _together(group: Group, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """One new token each: a group of query heads stands where several queries would, so no key is repeated."""
    n, heads, d = group.count, query.shape[1], query.shape[2]
    here, slots = slice(group.first, group.first + n), slice(group.slot, group.slot + n)
    q = query[here].reshape(n, keys.shape[2], -1, d)
    k, v = (x[slots, : group.length].transpose(1, 2) for x in (keys, values))
    made = scaled_dot_product_attention(q, k, v, group.mask, scale=scale)
    out[here] = made.reshape(n, heads, -1)


def _alone(
    span: Span, mask: Tensor | None, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor
) -> None:
    """Several new tokens of one sequence: key-value heads are the batch, so no key is repeated."""
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
    back = back - torch.arange(len(key), device=q.device)  # how far each key lies behind each query
    visible = back >= 0 if layer.window is None else (back >= 0) & (back < layer.window)
    return plain_attention(q, k, v, visible, layer).transpose(0, 1)


# ---- which sequences one call may serve ----------------------------------------------------------------------------


@dataclass(slots=True)
class Groups:
    """The grouping of sequences that each get one token a step. It holds for as long as the same ones run: all grow
    alike, so what lies past the shorter ones' ends stays as wide as it is."""

    runs: list[tuple[int, int]]  # the sequences a .. b - 1, which lie in neighbouring slots
    masks: list[Tensor | None]  # [b - a, room]: 0, and -inf at the end of shorter sequences' rows

    def at(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Group]:
        groups = []
        for (a, b), mask in zip(self.runs, self.masks, strict=True):
            longest = max(lengths[a:b])
            here = None if mask is None else mask[:, None, None, mask.shape[1] - longest :]
            groups.append(Group(slots[a], a, b - a, longest, here))
        return groups


def group(slots: Sequence[int], lengths: Sequence[int], room: int, dtype: torch.dtype) -> Groups:
    """Neighbouring slots share a call where reading past the shorter ones' ends costs less than another call."""
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
    """Refuse a model that the engine would sample from wrongly, in one line."""
    if not (can := sharing(model)).shared:
        raise ValueError(f"{can.reason}: the local engine cannot sample from it; serve it with vLLM")
    expected, logits = _compare(model)
    off = (logits.double() - expected.double()).square().mean().sqrt() / expected.double().std()
    if off > CLOSE:  # NaN weights are not this check's business
        raise ValueError(
            f"{type(model).__name__} does more around its attention than the local engine knows of (logits off by "
            f"{off:.0%} of their spread): serve it with vLLM"
        )


def _compare(model: Any) -> tuple[Tensor, Tensor]:
    """A prompt in three parts through the engine's passes, and the model run by itself: families differ in what
    they do around their attention, and a new one must not be sampled from wrongly in silence."""
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
