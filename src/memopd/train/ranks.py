"""One process or many: who does which pack, and how their numbers come together.

Everything here is the identity on one process, so that the same code runs on a laptop and on many nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from memopd.train.batch import Work

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[torch.device]:
    """Together with the other processes that torchrun started, where it did; gives this one's device."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(_backend(cuda))
    if cuda:
        torch.cuda.set_device(local)
    try:
        yield torch.device("cuda", local) if cuda else torch.device("cpu")
    except BaseException:
        if world() == 1:  # the other ranks may never arrive: with them, leaving is up to the launcher
            stop()
        raise
    stop()


def ensure_group(device: torch.device) -> None:
    """Sharding wants a process group, also where one process keeps master weights for itself alone."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device.type == "cuda"), store=HashStore(), rank=0, world_size=1)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(cuda: bool) -> str:
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if world() > 1:
        dist.barrier()


def gather(mine: T) -> list[T]:
    """What every rank has, in the order of the ranks."""
    if world() == 1:
        return [mine]
    everyone: list[Any] = [None] * world()
    dist.all_gather_object(everyone, mine)
    return everyone


def total(value: Tensor) -> Tensor:
    """The sum over ranks. For arrays in which each rank filled its own places and left zeros, nothing is rounded."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def deal(work: Sequence[Work], me: int | None = None, of: int | None = None) -> list[tuple[Work, bool]]:
    """This rank's packs, by row count, each with whether it is real.

    Sharded models run in step: a rank that has fewer packs than another runs its smallest again, for nothing.
    """
    me, of = rank() if me is None else me, world() if of is None else of
    hands: list[list[Work]] = [[] for _ in range(of)]
    loads = [0] * of
    for item in sorted(work, key=lambda w: -len(w.packed)) if of > 1 else work:
        to = loads.index(min(loads))
        hands[to].append(item)
        loads[to] += len(item.packed)
    passes = max(map(len, hands))
    filler = min(work, key=lambda w: len(w.packed))
    return [(w, True) for w in hands[me]] + [(filler, False)] * (passes - len(hands[me]))


def share(items: Iterable[T]) -> list[T]:
    """Every world-th item, beginning with the rank's own."""
    return list(items)[rank() :: world()]
