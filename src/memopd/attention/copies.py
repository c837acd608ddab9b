"""The gradient of a gather: every row gets the sum over its copies, in float32, always in the same order.

On a GPU, `index_add_` would use atomics, in an order that changes from run to run, and four kernels instead of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd.models.device import to_device


@dataclass(frozen=True, slots=True)
class Copies:
    """The places of the copies of each row: row r was copied to order[start[r] : start[r + 1]]."""

    index: Tensor  # [K] the row of each copy
    order: Tensor  # [K] the copies, sorted by row
    start: Tensor  # [T + 1]

    @classmethod
    def of(cls, index: NDArray[Any], rows: int, device: torch.device) -> Copies:
        order = np.argsort(index, kind="stable")
        start = np.searchsorted(index[order], np.arange(rows + 1))
        return cls(*(to_device(x, device, torch.int64) for x in (index, order, start)))

    def take(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.index)

    def sum(self, copies: Tensor) -> Tensor:
        """[K, ...] -> [T, ...], the adjoint of `take`, in at least float32."""
        rows = len(self.start) - 1
        if copies.is_cuda:
            from memopd.attention.copies_triton import sum_copies  # Triton exists only with a GPU

            return sum_copies(copies.contiguous(), self.order, self.start)
        precise = torch.promote_types(copies.dtype, torch.float32)
        total = copies.new_zeros(rows, *copies.shape[1:], dtype=precise)
        return total.index_add_(0, self.index, copies.to(precise))
