"""Gives a server new weights or a new adapter, and checks that it samples with them.

Each server has a label, `VERSION@WHERE`, which vLLM returns with every completion. So we notice when a server was
restarted and samples with the weights it was started with. The label of an adapter is `VERSION@adapter:WHERE`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from memopd.engine.protocol import Completion
from memopd.engine.vllm.servers import Fleet, Lost, Server, adapter_label, adapter_of
from memopd.engine.vllm.wire import BadAnswer
from memopd.files import json_object, whole
from memopd.types import Floats, Ids

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "Path | Mapping[str, Tensor] | Callable[[str], None]"
Score: TypeAlias = Callable[[Sequence[tuple[Ids, Ids]], float], Sequence[Floats]]

_SERVED = "memopd_served"  # in the metadata of the files that `write` writes
UNLABELLED = "default"  # vLLM's own label of the weights that the server was started with
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_ROUTES = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version")


class StaleWeights(ValueError):
    """A server does not sample with the weights it was given."""

    def __init__(self, url: str, version: int, gap: float, tolerance: float, adapter: bool = False) -> None:
        super().__init__(
            f"{url}: stale weights: its log-probabilities are {gap:.3g} from those of version {version} (tolerance "
            f"{tolerance:.3g}); restart it on "
            + ("the adapter's base" if adapter else "that checkpoint (vLLM on CPU cannot reload tied embeddings)")
        )
        self.url, self.version, self.gap, self.tolerance = url, version, gap, tolerance


def version_of(label: str | None) -> int:
    """The version in a label. Weights that were never updated are version 0."""
    head = (label or UNLABELLED).partition("@")[0]
    if head == UNLABELLED:
        return 0
    if not head.isdigit():
        raise ValueError(f"the weights are labelled {label!r}, not by MemOPD; give weights and version, or restart it")
    return int(head)


def label_of(weights: Path | Callable[[str], None], version: int) -> str:
    if not isinstance(weights, Path):
        return f"{version}@transfer"
    return adapter_label(version, weights) if is_adapter(weights) else f"{version}@{weights}"


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def checkpoint(path: Path) -> Path:
    """The absolute path of a checkpoint or adapter. A wrong folder kills the server that loads it, so we check it."""
    path = path.expanduser().resolve()
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path}: no *.safetensors to give to the policy servers")
    return path


def write(state: Mapping[str, Tensor], folder: Path, version: int) -> Path:
    """Write tensors, named as in a Hugging Face checkpoint, to a new folder."""
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int]] = set()
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.numel())  # tied weights are written once, as in checkpoints
        if storage not in seen:
            kept[name] = tensor.detach().cpu().contiguous()
        seen.add(storage)
    home = folder / f"weights-{version}"
    with whole(home / "model.safetensors") as partial:
        save_file(kept, partial, metadata={"format": "pt", _SERVED: "true"})
    return home


def remove_older(written: Path) -> None:
    """Remove the weights and adapters that MemOPD wrote for servers before these: no server will load them again.

    The files themselves tell who wrote them, so that a resumed run removes what it wrote before it was interrupted, and
    nobody loses a folder of their own.
    """
    ours = [old for old in written.parent.glob("weights-*") if _is_served_weights(old)]
    ours += [old for old in written.parent.glob("adapter-*") if _is_served_adapter(old)]
    for old in ours:
        if old != written:
            shutil.rmtree(old)


def _is_served_weights(folder: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "model.safetensors", "numpy") as held:
            return _SERVED in (held.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _is_served_adapter(folder: Path) -> bool:
    """Training writes an adapter for servers with our card and without a tokenizer; one to keep has both."""
    from memopd.models.folder import CARD  # imports torch

    try:
        card = json_object((folder / CARD).read_bytes())
    except (OSError, ValueError):
        return False
    return "tokenizer_digest" in card and card["tokenizer_digest"] is None


async def load(fleet: Fleet, server: Server, weights: Path | Callable[[str], None], label: str) -> None:
    """Give a server new weights, or an adapter. None of our requests may be open there."""
    for route in _ROUTES:
        if not await fleet.has(server, route):
            raise ValueError(
                f"{server.url} has no {route}: weights cannot be updated; start it with VLLM_SERVER_DEV_MODE=1 "
                "(memopd serve policy does)"
            )
    if adapter_of(label):
        assert isinstance(weights, Path)
        await _load_adapter(fleet, server, weights, label)
    elif isinstance(weights, Path):
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        await fleet.call(server, "POST", "/collective_rpc", json=reload)
    else:
        await asyncio.to_thread(weights, server.url)
    await _reset_prefix_cache(fleet, server)
    await fleet.call(server, "POST", "/update_weight_version", json={"new_version": label})
    server.label = label


async def _load_adapter(fleet: Fleet, server: Server, folder: Path, name: str) -> None:
    if not await fleet.has(server, _LOAD):
        raise ValueError(f"{server.url} takes no adapters: start it with memopd serve policy MODEL --lora-rank RANK")
    models = (await fleet.call(server, "GET", "/v1/models", timeout=10))["data"]
    ours = [model["id"] for model in models if adapter_of(model["id"])]
    if name in ours:  # the folder may have other content now, as when a run was started anew
        await fleet.tell(server, _UNLOAD, json={"lora_name": name})
    try:
        await fleet.tell(server, _LOAD, json={"lora_name": name, "lora_path": str(folder)})
    except Lost as error:
        if not isinstance(error.__cause__, BadAnswer):
            raise
        await fleet.call(server, "GET", "/health", timeout=10)  # raises `Lost` if the server died of it
        raise ValueError(f"{server.url} refuses the adapter {folder}: {error}") from error
    for old in ours:
        if old != name:
            await fleet.tell(server, _UNLOAD, json={"lora_name": old})


async def _reset_prefix_cache(fleet: Fleet, server: Server) -> None:
    """Drop keys and values of the old weights. The server refuses while requests of other clients use them."""
    try:
        async with asyncio.timeout(fleet.patience):
            while not (await fleet.call(server, "POST", "/reset_prefix_cache"))["success"]:
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Lost("requests of other clients use its prefix cache") from None


def rounding_tolerance(score: Score, precise: Score, pairs: Sequence[tuple[Ids, Ids]], temperature: float) -> float:
    """How far a server may be from the trainer when both have the same weights: three times the trainer's own error.

    `precise` is the trainer in more precise arithmetic. The error of a server that is as exact as we require of packed
    training is at most twice the trainer's (docs/architecture.md); the trainer's own error adds the third part.
    """
    ours, exact = score(pairs, temperature), precise(pairs, temperature)
    return 3 * float(np.max([np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(ours, exact, strict=True)]))


def gap(ours: Sequence[Floats], theirs: Sequence[Completion]) -> float:
    """The largest difference between our log-probability of a sampled token and theirs; NaN if any is NaN."""
    differences = []
    for i, (mine, completion) in enumerate(zip(ours, theirs, strict=True)):
        mine = np.asarray(mine, np.float64)
        assert completion.logprobs is not None
        if mine.shape != completion.logprobs.shape:
            raise ValueError(f"score: pair {i} has {len(completion.tokens)} sampled tokens, got {mine.shape}")
        differences.append(np.abs(mine - completion.logprobs).max())
    return float(np.max(differences))


def replay_gap(key: Sequence[Completion], theirs: Sequence[Completion]) -> float:
    """Like `gap`, against verified answers to the same requests. Rounding may make two answers differ from some token
    on, but not from the first."""
    differences = []
    for ours, other in zip(key, theirs, strict=True):
        assert ours.logprobs is not None
        assert other.logprobs is not None
        length = min(len(ours.tokens), len(other.tokens))
        alike = int(np.cumprod(ours.tokens[:length] == other.tokens[:length]).sum())
        if not alike:
            return float("inf")
        differences.append(np.abs(ours.logprobs[:alike] - other.logprobs[:alike]).max())
    return float(np.max(differences))
