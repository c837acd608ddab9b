"""Checkpoints appear complete or not at all, and you can load them with any number of ranks.

    checkpoints/step-000010/
        student-00000-of-00002.safetensors   each rank's rows of every tensor, in float32
        state.json                           step, sizes and digests of the files, and a digest of itself; written last
    checkpoints/latest                       the newest complete checkpoint and the digest of its state.json; written
                                             after it. You may write another checkpoint's name there, without a digest.
                                             If it is missing, the newest complete folder is used.

A reader checks every digest before it uses a file: a changed bit would resume silently with other weights.

FSDP splits tensors along their first dimension, so a reader with another number of ranks takes the rows it needs from
the files that contain them. The files are safetensors and JSON only, so that nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from memopd.files import digest, json_object, lasting, sync, temporary_folder, whole
from memopd.train import ranks


def save(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], keep: int) -> None:
    """`tensors` maps a name (student, critic, ...) to tensors, sharded or whole. All ranks must call it.

    Nothing else must be saved, because schedules, batches and seeds are functions of the step.
    """
    folder = run / "checkpoints" / f"step-{step:06d}"
    if first := ranks.rank() == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent) if first else nullcontext(folder) as mine:
        partial = ranks.gather(mine)[0] / folder.name
        if first:
            partial.mkdir()
        ranks.barrier()
        parts = [_write(partial, name, group) for name, group in tensors.items()]
        files = {part.name: part for of_rank in ranks.gather(parts) for part in of_rank}
        if first:
            _write_state(partial, step, files)
            shutil.rmtree(folder, ignore_errors=True)  # from a run that was killed before it wrote `latest`
            partial.rename(folder)
            with whole(folder.parent / "latest", durable=True) as file:
                file.write_text(f"{folder.name} {digest(folder / 'state.json')}\n")
            for old in _steps(folder.parent, up_to=step)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


class _File(NamedTuple):
    name: str
    size: int
    sha256: str


def _write(folder: Path, name: str, group: dict[str, Tensor]) -> _File:
    file = folder / f"{name}-{ranks.rank():05d}-of-{ranks.world():05d}.safetensors"
    starts = {key: str(_start(value)) for key, value in group.items()}
    try:
        save_file({key: _local(value).cpu().contiguous() for key, value in group.items()}, file, starts)
    except SafetensorError as error:  # safetensors wraps system errors, such as a full disk
        raise OSError(f"{lasting(file)}: cannot be written ({error}); the last checkpoint is intact") from None
    sync(file)
    return _File(file.name, file.stat().st_size, digest(file))


def _write_state(folder: Path, step: int, files: dict[str, _File]) -> None:
    names = sorted(files)
    content: dict[str, Any] = {
        "step": step,
        "files": {name: files[name].size for name in names},
        "sha256": {name: files[name].sha256 for name in names},
    }
    state = folder / "state.json"
    state.write_text(json.dumps(content | {"digest": _digest_of(content)}, indent=2) + "\n")
    sync(state)
    sync(folder)


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def latest(run: Path) -> Path | None:
    """The folder that `latest` names. Raises an error if `latest` or the checkpoint's state.json is damaged.

    Without `latest` it is the newest complete folder: `latest` was lost, or the run was killed just before the first.
    """
    pointer = run / "checkpoints" / "latest"
    if not pointer.is_file():
        complete = [f for f in pointer.parent.glob("step-*") if (f / "state.json").is_file()]
        newest = max(complete, key=lambda f: int(f.name.removeprefix("step-")), default=None)
        if newest is not None:
            _state(newest)
        return newest
    text = pointer.read_bytes().decode(errors="replace")
    name, _, expected = text.removesuffix("\n").partition(" ")
    folder = pointer.parent / name
    if not re.fullmatch(r"step-[0-9]{6,}", name) or not folder.is_dir():
        raise ValueError(f"{pointer}: names no checkpoint, cut short or damaged; {_advice(pointer)}")
    _state(folder)  # names state.json if it is the damaged one of the two
    if expected and digest(folder / "state.json") != expected:
        raise ValueError(f"{pointer}: damaged, or not of this {folder.name}; {_advice(pointer)}")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json, after a check of every file. All ranks must call it: each reads a share of the files.

    Checkpoints of older versions have no digests; of these, only the sizes are checked.
    """
    state = _state(folder)
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in state["files"]:
            raise ValueError(f"{file}: not a file of this checkpoint; remove it")
    for name, size in state["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(f"{file}: cut short or missing; {_advice(folder)}")
    expected = state.get("sha256", {})
    damaged = [name for name in ranks.share(expected) if digest(folder / name) != expected[name]]
    for name in sorted(name for of_rank in ranks.gather(damaged) for name in of_rank):
        raise ValueError(f"{folder / name}: damaged, its content does not match its digest; {_advice(folder)}")
    return state


def _state(folder: Path) -> dict[str, Any]:
    """The content of state.json, after a check of its own digest."""
    file = folder / "state.json"
    try:
        state = json_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not a complete checkpoint ({error}); {_advice(folder)}") from None
    sealed = state.pop("digest", None)
    if ("sha256" in state or sealed is not None) and sealed != _digest_of(state):
        raise ValueError(f"{file}: damaged, its content does not match its digest; {_advice(folder)}")
    step, files = state.get("step"), state.get("files")
    if not isinstance(step, int) or not isinstance(files, dict) or folder.name != f"step-{step:06d}":
        raise ValueError(f"{file}: not the state of {folder.name}; {_advice(folder)}")
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
