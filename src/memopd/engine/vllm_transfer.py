"""Weights from the trainer's GPU to the servers' through vLLM's own transfer (NCCL), not through files.

    engine.update(Transfer(model, host="10.0.0.1"), version=8)

It needs vLLM in the trainer's environment and servers started with `--weight-transfer-config '{"backend": "nccl"}'`,
on other GPUs than the trainer's. Tests run it up to the point where tensors move, which needs two GPUs and was not
seen by us. What arrives is verified like every update: weights that did not arrive stop the run.
"""

from __future__ import annotations

import socket
from typing import Any

import httpx


class Transfer:
    """A function that sends a model's parameters, as they are now, to the server whose address it is given.

    It keeps the connection: make one per run, and give it to every update.
    """

    def __init__(self, model: Any, host: str) -> None:
        self._model, self._host = model, host  # the trainer's address, as the servers see it
        self._senders: dict[str, Any] = {}

    def __call__(self, url: str) -> None:
        if url not in self._senders:
            self._senders[url] = self._connect(url)
        self._senders[url].send_weights()

    def _connect(self, url: str) -> Any:
        try:
            from vllm.distributed import weight_transfer as theirs  # type: ignore[import-not-found, unused-ignore]
            from vllm.distributed.weight_transfer import nccl_engine  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ValueError("weight transfer needs vLLM in the trainer's environment; or give a folder") from error
        workers = httpx.get(f"{url}/get_world_size", timeout=10).raise_for_status().json()["world_size"]
        meeting = nccl_engine.NCCLTrainerInitInfo(self._host, _free_port(self._host), world_size=1 + workers, rank=0)
        client, source = theirs.HTTPVLLMWeightSyncClient(url), theirs.ModuleSource(self._model)
        return theirs.WeightTransferTrainerFactory.trainer_init(meeting, client=client, source=source)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
