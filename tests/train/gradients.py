"""Keeps the gradient of every optimiser step of a run, and changes on purpose that a comparison must notice.

`before` is for a command that is forked; `python gradients.py FOLDER CHANGE ARGUMENTS...` is `memopd ARGUMENTS...` for
torchrun to start.
"""

import runpy
import sys
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def before(folder: Path, change: str = "") -> None:
    if change:
        CHANGES[change]()
    folder.mkdir(parents=True, exist_ok=True)
    number = count()

    def keep(optimiser, *_):
        from memopd.train import ranks

        grads = [p.grad for group in optimiser.param_groups for p in group["params"]]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        if ranks.rank() == 0:
            tensors = {str(i): g.contiguous() for i, g in enumerate(whole)}
            save_file(tensors, folder / f"{next(number):03d}.safetensors")

    register_optimizer_step_pre_hook(keep)


def read(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The actor's of the first update, the critic's of the first, the actor's of the second, ..."""
    return [load_file(file) for file in sorted(folder.iterdir())]


# ---- what must not go unnoticed -------------------------------------------------------------------------------


def a_row_sees_one_too_many() -> None:
    """The last pack lets one row see into the call beside it. (The run's own check looks at the largest.)"""
    from memopd.train import batch

    fill = batch.fill

    def widened(calls, budget):
        *packs, last = fill(calls, budget)
        inside = (last.exit < len(last)).nonzero()[0]
        last.exit[inside[-1]] += 1
        return [*packs, last]

    batch.fill = widened


def a_mean_over_each_pack() -> None:
    """The oldest mistake of gradient accumulation: a mean of means instead of one mean over the mini-batch."""
    from memopd.train import algorithms

    total = algorithms.policy_loss
    algorithms.policy_loss = lambda logp, *more: total(logp, *more) * 1000 / len(logp)


def a_ratio_of_each_pack() -> None:
    """All calls of a pack are taken for one sequence."""
    from memopd.train.algorithms import Tokens

    Tokens.call_mean = lambda tokens, values: values.mean().expand(len(tokens.call_size))


def ranks_are_averaged() -> None:
    """FSDP's average is taken for the sum that it is not."""
    from memopd.train import update

    update.backward = lambda loss, is_real: (loss * is_real).backward()


def recomputed_otherwise() -> None:
    """What the backward pass computes again differs by a thousandth from what the forward pass computed."""
    from memopd.attention.dense import DensePlan

    attend = DensePlan.attend
    DensePlan.attend = lambda *a, **k: attend(*a, **k) * (1.0 if torch._C._current_graph_task_id() == -1 else 1.001)


CHANGES = {
    f.__name__: f
    for f in (
        a_row_sees_one_too_many,
        a_mean_over_each_pack,
        a_ratio_of_each_pack,
        ranks_are_averaged,
        recomputed_otherwise,
    )
}


if __name__ == "__main__":
    before(Path(sys.argv[1]), sys.argv[2])
    sys.argv = ["memopd", *sys.argv[3:]]
    runpy.run_module("memopd.cli", run_name="__main__")  # ends a rank as the command does
