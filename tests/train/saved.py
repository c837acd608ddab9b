"""A checkpoint's tensors, put together from what every rank saved: read here without the code under test."""

from pathlib import Path

import torch
from safetensors import safe_open


def read_whole(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Every tensor of `name`; rows of the ranks one after the other, and once what every rank holds whole."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(folder.glob(f"{name}-[0-9]*-of-*.safetensors")):
        with safe_open(file, "pt") as saved:
            for key, start in saved.metadata().items():
                rows = saved.get_tensor(key)
                if not rows.ndim or len(rows):
                    pieces.setdefault(key, {}).setdefault(int(start), rows)
    return {
        key: torch.cat(list(parts.values())) if len(parts) > 1 else next(iter(parts.values()))
        for key, parts in pieces.items()
    }
