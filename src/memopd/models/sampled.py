"""An adapted model as the engine samples from it: the same weights, fewer kernels per layer.

A decoding step of a small model is hundreds of tiny kernels, and their number is its time. PEFT's layers launch six
more for every adapted layer: two casts of the precise weights, two products, a scale and a sum. Here the casts are made
once per `refresh`, and two products are left, the second of which adds to the base's output. It rounds as the model
does, up to the two results in between that are no longer rounded.

Merging the adapter into a copy of the base would launch none, but in half precision it loses whatever is smaller than
the rounding of a weight, which is most of a young adapter.

The buffers keep their addresses, so that CUDA graphs of the model stay valid.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear


class SamplingCopy:
    """`model` computes as `source` does with `adapter` active, as of the last `refresh`.

    It has its own modules, and shares every weight but the adapter's with `source`.
    """

    def __init__(self, source: Any, adapter: str) -> None:
        shared = {id(t): t for t in (*source.parameters(), *source.buffers())}
        self.model = deepcopy(source, shared).eval()  # so that the copies of modules hold the very tensors
        layers: dict[str, Any] = {n: m for n, m in source.named_modules() if isinstance(m, LoraLinear)}
        self._casts: list[Tensor] = []
        self._weights: list[Tensor] = []
        for name, layer in layers.items():
            own = self.model.get_submodule(name).base_layer
            if adapter in layer.lora_A:
                weights = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                own = BesideLinear(own, *weights, layer.scaling[adapter])
                self._casts += [own.down, own.up]
                self._weights += weights
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, own)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the adapter's current weights, in place."""
        torch._foreach_copy_(self._casts, self._weights)


class BesideLinear(nn.Module):
    """base(x) + scale · B A x, for sampling: it has no gradient in A and B."""

    def __init__(self, base: nn.Module, down: Tensor, up: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        dtype = next(base.parameters()).dtype
        self.down, self.up = (nn.Parameter(w.detach().to(dtype, copy=True), requires_grad=False) for w in (down, up))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        down = linear(x, self.down).flatten(0, -2)
        out.view(-1, out.shape[-1]).addmm_(down, self.up.t(), alpha=self.scale)
        return out
