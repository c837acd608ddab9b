"""A model as the engine samples from it on a GPU: the same weights, fewer kernels per layer.

A decoding step of a small model is hundreds of tiny kernels, and their number is its time. So layers that read the
same rows, such as the projections to queries, keys and values, are one product here. PEFT's layers launch six more
kernels for every adapted layer: two casts of the precise weights, two products, a scale and a sum. Here the casts are
made once per `refresh`, the rows of A follow those of the base in memory and are part of its product, and one kernel is
left for every group, which adds B's product to the base's output in place. It rounds as the model does, up to the two
results in between that are no longer rounded.

Merging the adapter into a copy of the base would launch none, but in half precision it loses whatever is smaller than
the rounding of a weight, which is most of a young adapter.

The buffers keep their addresses, so that CUDA graphs of the model stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear

# Layers of one module that most families apply to the same rows. They are told apart by these rows, not by the names: a
# layer that gets other rows computes its own product.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


ALIGNED = 8  # rows: a product's results start at multiples of 16 bytes in half precision
DEVICES = ("cuda",)  # where the number of kernels decides how long a step takes


def sampling_model(model: Any, adapter: str | None = None) -> Any:
    """A model that is not trained, as an engine should sample from it: with fewer kernels, where that matters."""
    return SamplingCopy(model, adapter).model if model.device.type in DEVICES else model


class SamplingCopy:
    """`model` computes as `source` does with `adapter` active, as of the last `refresh`.

    It has its own modules, and shares every weight but the adapter's with `source`. The weights of a group become parts
    of one tensor, for both.
    """

    def __init__(self, source: Any, adapter: str | None = None) -> None:
        for group in _groups(source, adapter):
            _join([base_of(layer) for layer in group], _room(group, adapter))
        shared = {id(t): t for t in (*source.parameters(), *source.buffers())}
        self.model = deepcopy(source, shared)  # so that the copies of modules hold the very tensors
        self._casts: list[Tensor] = []
        self._weights: list[Tensor] = []
        for parent in list(self.model.modules()):
            for names in TOGETHER:
                if group := _group(parent, names, adapter):
                    self._replace_group(parent, names, group, adapter)
        for name, layer in [(n, m) for n, m in self.model.named_modules() if isinstance(m, LoraLinear)]:
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, self._beside([layer], adapter))
        self.model.eval()  # the new modules too

    def _replace_group(
        self, parent: nn.Module, names: Sequence[str], group: Sequence[Any], adapter: str | None
    ) -> None:
        together = Together(self._beside(group, adapter), [len(base_of(layer).weight) for layer in group])
        for i, name in enumerate(names):
            setattr(parent, name, Member(together, i))

    def _beside(self, group: Sequence[Any], adapter: str | None) -> nn.Module:
        """The layers of a group as one, with their adapters beside it."""
        room = _room(group, adapter)
        whole = _joined([base_of(layer) for layer in group], room)
        if adapter is None or not _has(group[0], adapter):
            return whole
        weights = [(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight) for layer in group]
        scale = group[0].scaling[adapter]
        made = BesideLinear(whole, weights, scale, room) if room else BesideAny(whole, *weights[0], scale)
        self._casts += made.parts
        self._weights += [weight for pair in weights for weight in pair]
        return made

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the adapter's current weights, in place."""
        if self._casts:
            torch._foreach_copy_(self._casts, self._weights)


def base_of(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, LoraLinear) else layer


def _groups(model: Any, adapter: str | None) -> Iterator[list[Any]]:
    """The layers that are one product, each in one group."""
    grouped: set[int] = set()
    for parent in model.modules():
        for names in TOGETHER:
            if group := _group(parent, names, adapter):
                grouped |= {id(layer) for layer in group}
                yield group
    for layer in model.modules():
        if isinstance(layer, LoraLinear) and id(layer) not in grouped and _room([layer], adapter):
            yield [layer]


def _group(parent: nn.Module, names: Sequence[str], adapter: str | None) -> list[Any]:
    """The layers of `parent` with these names, if they can be one product; else an empty list."""
    layers: list[Any] = [getattr(parent, name, None) for name in names]
    bases = [base_of(layer) for layer in layers]
    if not all(type(base) is nn.Linear for base in bases):
        return []
    if len({(b.in_features, b.weight.dtype, b.weight.device, b.bias is None) for b in bases}) > 1:
        return []
    scales = {layer.scaling[adapter] if adapter and _has(layer, adapter) else None for layer in layers}
    return layers if len(scales) == 1 else []


def _has(layer: Any, adapter: str) -> bool:
    return isinstance(layer, LoraLinear) and adapter in layer.lora_A


def _room(group: Sequence[Any], adapter: str | None) -> int:
    """How many rows the A of a group need, rounded up so that the results stay aligned in memory. Layers that are not
    `nn.Linear`, such as GPT-2's, have none: they keep their weights the other way round."""
    if adapter is None or not _has(group[0], adapter) or type(base_of(group[0])) is not nn.Linear:
        return 0
    return -(-sum(len(layer.lora_A[adapter].weight) for layer in group) // ALIGNED) * ALIGNED


def _join(bases: Sequence[nn.Linear], room: int) -> None:
    """Put the weights of several layers side by side in memory, with `room` more rows of zeros. The parameters stay the
    same objects."""
    weights, biases = [base.weight for base in bases], [base.bias for base in bases if base.bias is not None]
    for parameters in (weights, biases) if biases else (weights,):
        rows = [p.data for p in parameters]
        joined = torch.cat([*rows, rows[0].new_zeros(room, *rows[0].shape[1:])])
        for parameter, part in zip(parameters, joined.split([len(p) for p in rows] + [room]), strict=False):
            parameter.data = part


def _joined(bases: Sequence[Any], room: int) -> Any:
    """Layers whose weights `_join` put side by side, as one layer over the same memory."""
    if len(bases) == 1 and not room:
        return bases[0]
    rows = sum(len(base.weight) for base in bases) + room
    first = bases[0]
    whole = nn.Linear(first.in_features, rows, first.bias is not None, device="meta")
    whole.weight = _whole(first.weight, rows)
    if first.bias is not None:
        whole.bias = _whole(first.bias, rows)
    return whole


def _whole(first: Tensor, rows: int) -> nn.Parameter:
    """The tensor that begins with `first` and has `rows` rows in the same memory."""
    shape, stride = (rows, *first.shape[1:]), first.stride()
    return nn.Parameter(first.detach().as_strided(shape, stride), requires_grad=False)


class Together(nn.Module):
    """Several layers that get the same rows, as one product. It keeps the results for the layers that ask next."""

    def __init__(self, layer: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.sizes = layer, list(sizes)
        self.rows: Tensor | None = None
        self.results: tuple[Tensor, ...] = ()

    def part(self, x: Tensor, index: int) -> Tensor:
        if self.rows is not x:
            self.rows, self.results = x, self.layer(x).split(self.sizes, -1)
        found = self.results[index]
        if index == len(self.sizes) - 1:
            self.rows, self.results = None, ()
        return found


class Member(nn.Module):
    """One of the layers of `together`."""

    def __init__(self, together: Together, index: int) -> None:
        super().__init__()
        self.together, self.index = together, index

    def forward(self, x: Tensor) -> Tensor:
        return self.together.part(x, self.index)


class BesideLinear(nn.Module):
    """base(x) + scale · B A x, for sampling: it has no gradient in A and B.

    The last `room` rows of `whole` are those of A. For a group of layers, A has the rows of all their A, and B has
    their B on its diagonal.
    """

    def __init__(self, whole: nn.Linear, adapters: Sequence[tuple[Tensor, Tensor]], scale: float, room: int) -> None:
        super().__init__()
        self.whole, self.scale = whole, scale
        rows = len(whole.weight) - room
        self.up = nn.Parameter(whole.weight.new_zeros(rows, room), requires_grad=False)
        self.parts = list(self._parts(adapters, whole.weight.data[rows:]))
        torch._foreach_copy_(self.parts, [w.detach() for pair in adapters for w in pair])

    def _parts(self, adapters: Sequence[tuple[Tensor, Tensor]], down: Tensor) -> Iterator[Tensor]:
        """The places of every A and B, in order."""
        rank = row = 0
        for a, b in adapters:
            yield down[rank : rank + len(a)]
            yield self.up.data[row : row + len(b), rank : rank + len(a)]
            rank, row = rank + len(a), row + len(b)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = beside(x, self.whole.weight, self.whole.bias, self.up, self.scale)
        return out


class BesideAny(nn.Module):
    """The same beside a layer of any kind, with one product more."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        dtype = next(base.parameters()).dtype
        self.down, self.up = (nn.Parameter(w.detach().to(dtype, copy=True), requires_grad=False) for w in (a, b))
        self.parts = [self.down.data, self.up.data]

    def forward(self, x: Tensor) -> Tensor:
        low = linear(x, self.down)
        out: Tensor = self.base(x)
        return out.add_(linear(low, self.up), alpha=self.scale)


@torch.library.custom_op("memopd::beside", mutates_args=())
def beside(x: Tensor, whole: Tensor, bias: Tensor | None, up: Tensor, scale: float) -> Tensor:
    """One operator, because the compiler would copy the base's output before it adds to it."""
    rows, room = up.shape
    both = linear(x, whole, bias)
    flat = both.view(-1, rows + room)
    flat[:, :rows].addmm_(flat[:, rows:], up.t(), alpha=scale)
    return both[..., :rows]


@beside.register_fake
def _(x: Tensor, whole: Tensor, bias: Tensor | None, up: Tensor, scale: float) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(whole))[..., : len(up)]
