"""Distributes packs over processes and combines their results.

With one process every function is the identity, so that the same code runs on a laptop and on many nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from memopd.train.batch import Work

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[torch.device]:
    """Joins the other processes if torchrun started this one, and yields the device of this process."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(_backend(cuda))
    if cuda:
        torch.cuda.set_device(local)
    try:
        yield torch.device("cuda", local) if cuda else torch.device("cpu")
    except BaseException:
        if world() == 1:  # other ranks may never reach `stop`, so with several ranks the launcher ends them
            stop()
        raise
    stop()


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
    """The values of all ranks, in their order."""
    if world() == 1:
        return [mine]
    everyone: list[Any] = [None] * world()
    dist.all_gather_object(everyone, mine)
    return everyone


def total(value: Tensor) -> Tensor:
    """The sum over ranks. If each rank filled only its own places of an array of zeros, the sum is exact."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def deal(work: Sequence[Work], me: int | None = None, of: int | None = None) -> list[tuple[Work, bool]]:
    """The packs of this rank, balanced by rows, each with a flag that is False for a filler.

    The ranks of a sharded model must make the same number of passes: a rank with fewer packs than another repeats the
    smallest pack as a filler, and discards the result.
    """
    me, of = rank() if me is None else me, world() if of is None else of
    assigned: list[list[Work]] = [[] for _ in range(of)]
    loads = [0] * of
    for item in sorted(work, key=lambda w: -len(w.packed)) if of > 1 else work:
        to = loads.index(min(loads))
        assigned[to].append(item)
        loads[to] += len(item.packed)
    passes = max(map(len, assigned))
    filler = min(work, key=lambda w: len(w.packed))
    return [(w, True) for w in assigned[me]] + [(filler, False)] * (passes - len(assigned[me]))


def share(items: Iterable[T]) -> list[T]:
    """Every world-th item, starting at the index of this rank."""
    return list(items)[rank() :: world()]
