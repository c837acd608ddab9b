"""Arrays on their way to a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array as a tensor on `device`. The host does not wait for the work that it launched there before.

    From ordinary memory PyTorch copies to a GPU only after all earlier work is done. The host then could not launch the
    next pack while the GPU computes the last one. From pinned memory it can.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
