"""How one forward pass of the engine attends: new tokens of many sequences in one flat row, their past in the cache.

transformers hands every layer's queries, keys and values to `attend`, registered under NAME, together with the Pass
that came as a keyword of `model(...)`. New keys and values go into the cache first; then every sequence's new tokens
read its own slot, up to themselves. As no mask function is registered with the name, transformers makes no mask.

Three ways to read, one result: PyTorch's kernel on a CPU, the kernel of `kernel.py` on a GPU, and plain products where
a layer has a window, a soft cap or sinks, or where neither kernel serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import AttentionInterface

from memopd.engine.local.cache import Cache

NAME = "memopd-engine"

# Keys whose reading costs as much as another call of PyTorch's CPU kernel: sequences of nearly equal length share one.
CALL_COST = 150


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

    def attend(
        self,
        layer: int,
        query: Tensor,  # [T, Hq, d]
        key: Tensor,  # [T, Hkv, d]
        value: Tensor,  # [T, Hkv, dv]
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,  # [Hq]
    ) -> Tensor:  # [T, Hq, dv]
        keys, values = self.cache.write(layer, self.rows, key, value)
        if window is not None and window >= self.cache.length:
            window = None
        special = window is not None or softcap is not None or sinks is not None or keys.dtype == torch.float64
        if (query.is_cuda or self.tiles is not None) and not special:
            if self.tiles is None:
                from memopd.engine.local.kernel import tiles_of  # not where there is no GPU

                self.tiles = tiles_of(self.spans, query.shape[1] // key.shape[1], self.cache.length, query.device)
            return self.tiles.attend(query, keys, values, scale)
        self.cache.special |= special
        assert self.spans, "a captured pass knows no spans"
        out = query.new_empty(*query.shape[:2], value.shape[2])
        if special or query.device.type != "cpu":
            for span in self.spans:
                here = slice(span.first, span.first + span.count)
                past = keys[span.slot, : span.length], values[span.slot, : span.length]
                out[here] = _plain(query[here], *past, span.position, scale, window, softcap, sinks)
            return out
        for group in self.groups:
            _together(group, query, keys, values, scale, out)
        for span in self.alone:
            _alone(span, self._mask(span, query), query, keys, values, scale, out)
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


def _plain(
    query: Tensor,  # [n, Hq, d]
    key: Tensor,  # [length, Hkv, d]
    value: Tensor,
    position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The definition, in products and a softmax, one sequence at a time: slow, and right for every kind of layer."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    scores = q @ k.transpose(1, 2) * scale  # [Hq, n, length]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    back = torch.arange(position, position + len(query), device=q.device)[:, None]
    back = back - torch.arange(len(key), device=q.device)  # how far each key lies behind each query
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
    weights = softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]  # the sink takes its share and gives nothing
    return (weights @ v).transpose(0, 1)


HARMLESS = {"position_ids", "cache_position"}  # what layers also pass on


def attend(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, d]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    memopd_pass: Pass | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if memopd_pass is None or attention_mask is not None or dropout:
        raise ValueError(
            "the model is in use by memopd's engine, which has set its attention: run it when no request is open"
        )
    if unknown := [name for name, x in rest.items() if isinstance(x, Tensor) and name not in HARMLESS]:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which memopd's engine does not know"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return memopd_pass.attend(layer, q, k, v, scale, sliding_window, softcap, s_aux)[None], None


AttentionInterface.register(NAME, attend)


@contextmanager
def borrowed(model: Any) -> Iterator[None]:
    """The model as the engine runs it: its own attention, no dropout, no gradients; afterwards all as it was."""
    before, training = model.config._attn_implementation, [m for m in model.modules() if m.training]
    if before == NAME:
        raise ValueError("this model is in use by another engine: wait until its requests are done, or use one engine")
    model.set_attn_implementation(NAME)
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:  # one by one: a trainer may keep parts of its model in eval mode
            module.training = True
        model.set_attn_implementation(before)


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
