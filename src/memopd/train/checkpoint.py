"""Checkpoints appear complete or not at all, and you can load them with any number of ranks.

    checkpoints/step-000010/
        student-00000-of-00002.safetensors   each rank's rows of every tensor, in float32
        state.json                           step and file sizes; written last
    checkpoints/latest                       the name of the newest complete checkpoint; written after it

FSDP splits tensors along their first dimension, so a reader with another number of ranks takes the rows it needs from
the files that contain them. The files are safetensors and JSON only, so that nothing is unpickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from memopd.files import sync, whole
from memopd.train import ranks


def save(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], keep: int) -> None:
    """`tensors` maps a name (student, critic, ...) to tensors, sharded or whole. All ranks must call it.

    Nothing else must be saved, because schedules, batches and seeds are functions of the step.
    """
    folder = run / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_name(f".{folder.name}.partial")
    if ranks.rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # from a run that was killed before it wrote `latest`
        partial.mkdir(parents=True)
    ranks.barrier()
    for name, group in tensors.items():
        _write(partial / f"{name}-{ranks.rank():05d}-of-{ranks.world():05d}.safetensors", group)
    ranks.barrier()
    if ranks.rank() == 0:
        files = {f.name: f.stat().st_size for f in sorted(partial.iterdir())}
        state = partial / "state.json"
        state.write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n")
        sync(state)
        sync(partial)
        partial.rename(folder)
        with whole(folder.parent / "latest", durable=True) as file:
            file.write_text(folder.name + "\n")
        for old in _steps(folder.parent, up_to=step)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


def _write(file: Path, group: dict[str, Tensor]) -> None:
    starts = {key: str(_start(value)) for key, value in group.items()}
    try:
        save_file({key: _local(value).cpu().contiguous() for key, value in group.items()}, file, starts)
    except SafetensorError as error:  # safetensors wraps system errors, such as a full disk
        shutil.rmtree(file.parent, ignore_errors=True)
        raise OSError(f"{file}: cannot be written ({error}); the last checkpoint is intact") from None
    sync(file)


def latest(run: Path) -> Path | None:
    pointer = run / "checkpoints" / "latest"
    return pointer.parent / pointer.read_text().strip() if pointer.is_file() else None


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, after a check that every file exists with its full size."""
    try:
        state = dict(json.loads((folder / "state.json").read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: not a complete checkpoint ({error}); {_advice(folder)}") from None
    for name, size in state["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(f"{file}: cut short or missing; {_advice(folder)}")
    return state


def restore(folder: Path | None, tensors: dict[str, dict[str, Tensor]]) -> None:
    """Fill the tensors that `save` wrote from a checkpoint, if there is one."""
    if folder is not None:
        for name, into in tensors.items():
            load(folder, name, into)


def load(folder: Path, name: str, into: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or whole, in place from a checkpoint that any number of ranks saved."""
    try:
        readers = _readers(folder, name)
        for key, target in into.items():
            local, begin = _local(target), _start(target)
            filled = 0
            for start, rows in _pieces(readers, key):
                if local.ndim == 0:
                    local.copy_(rows[...])
                    filled = 1
                    break
                length = rows.get_shape()[0]
                low, high = max(start, begin), min(start + length, begin + len(local))
                if low < high:
                    local[low - begin : high - begin].copy_(rows[low - start : high - start])
                    filled += high - low
            if filled != (len(local) if local.ndim else 1):
                raise ValueError(f"{folder}: {name}: {key} is incomplete; {_advice(folder)}")
    except SafetensorError as error:
        raise ValueError(f"{folder}: {name}: unreadable ({error}); {_advice(folder)}") from None


def optimiser_tensors(optimiser: torch.optim.AdamW, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """AdamW's state under the names of the parameters. Creates the state if no step was taken yet."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in weights.items():
        state = optimiser.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if optimiser.defaults["fused"] else None)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        tensors |= {f"{name}.{key}": value for key, value in state.items()}
    return tensors


def _readers(folder: Path, name: str) -> list[Any]:
    """One reader per rank that saved the checkpoint, in the order of the ranks."""
    files = sorted(folder.glob(f"{name}-[0-9]*-of-*.safetensors"))  # not those of {name}-optimiser
    if not files:
        raise ValueError(f"{folder}: has no {name}; {_advice(folder)}")
    return [safe_open(file, "pt") for file in files]


def _pieces(readers: list[Any], key: str) -> Iterator[tuple[int, Any]]:
    """(first row, rows) in the order of the ranks. A tensor that was not sharded is in every file, and yielded once."""
    seen: set[int] = set()
    for reader in readers:
        start = int(reader.metadata()[key])
        rows = reader.get_slice(key)
        if start not in seen and (not rows.get_shape() or rows.get_shape()[0]):
            seen.add(start)
            yield start, rows


def _local(value: Tensor) -> Tensor:
    value = value.detach()  # shares its memory, so that filling it fills the parameter
    return value.to_local() if isinstance(value, DTensor) else value


def _start(value: Tensor) -> int:
    """The first row of this rank: FSDP splits like torch.chunk."""
    if not isinstance(value, DTensor) or value.ndim == 0:
        return 0
    chunk = -(-value.shape[0] // ranks.world())
    return min(chunk * ranks.rank(), value.shape[0])


def _steps(folder: Path, up_to: int) -> list[Path]:
    """Checkpoints up to a step, oldest first. Later ones remain from before the run was resumed at an earlier step."""
    return [f for f in sorted(folder.glob("step-*")) if int(f.name.removeprefix("step-")) <= up_to]


def _advice(folder: Path) -> str:
    others = [f.name for f in sorted(folder.parent.glob("step-*")) if f != folder and (f / "state.json").is_file()]
    return f"write {others[-1]} into {folder.parent / 'latest'} to continue from there" if others else "start again"
