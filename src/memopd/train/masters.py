"""Mixed precision in one process: the model computes in half precision, and AdamW changes precise master weights.

The model's own weights are the masters, rounded once per optimiser step. Every pass of the update reads them, and so
does the engine that samples. The gradients of each backward pass are in half precision; their sum over the packs of a
mini-batch is kept with the masters, in their precision. This is what FSDP's mixed precision computes, to the bit, but
FSDP rounds all weights again in every forward and every backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Masters:
    """The precise weights of `model`, whose own are rounded to `dtype` in place, except for the names in `precise`."""

    def __init__(self, model: Any, dtype: torch.dtype, precise: Collection[str] = ()) -> None:
        self.weights: dict[str, Tensor] = {}  # as the optimiser and checkpoints see them
        self.rounded: list[Tensor] = []  # the weights of the model that have a master
        self.masters: list[Tensor] = []  # theirs, in the same order
        for name, parameter in model.named_parameters():
            if name in precise:
                self.weights[name] = parameter
                continue
            self.weights[name] = master = nn.Parameter(parameter.detach())
            parameter.data = parameter.detach().to(dtype)
            parameter.register_post_accumulate_grad_hook(partial(_add_gradient, master))
            self.rounded.append(parameter)
            self.masters.append(master)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, in place: CUDA graphs of the model stay valid."""
        torch._foreach_copy_(self.rounded, self.masters)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Inside the block, the masters are the model's weights."""
        rounded = [parameter.data for parameter in self.rounded]
        try:
            for parameter, master in zip(self.rounded, self.masters, strict=True):
                parameter.data = master.data
            yield
        finally:
            for parameter, data in zip(self.rounded, rounded, strict=True):
                parameter.data = data


def _add_gradient(master: Tensor, parameter: Tensor) -> None:
    """Add the gradient of one backward pass to the master's, and free it."""
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None
