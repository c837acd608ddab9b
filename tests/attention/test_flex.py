"""The block mask, which needs no GPU: against the dense mask, block by block."""

import numpy as np
import pytest
import torch

from memopd.attention.dense import DensePlan
from memopd.attention.flex import BLOCK, FlexPlan, build_block_mask
from memopd.compile import compile_calls
from memopd.types import Call


def mem1_pack(seed):
    rng = np.random.default_rng(seed)
    q, memory, calls = rng.integers(0, 9, 200), np.zeros(0, int), []
    for t in range(4):
        calls.append(Call(np.concatenate([q, memory, rng.integers(0, 9, 90 + 20 * t)]), rng.integers(0, 9, 40 + seed)))
        memory = calls[-1].completion
    return compile_calls(calls)


def blocks_of(count, indices):
    n = count.shape[-1]
    made = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        made[i, indices[0, 0, i, : count[0, 0, i]].long()] = True
    return made


@pytest.mark.parametrize("window", [None, 50, 150])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_those_of_the_dense_mask(seed, window):
    packed = mem1_pack(seed)
    T = len(packed)
    padded = -(-T // BLOCK) * BLOCK
    exit, positions = torch.arange(1, padded + 1, dtype=torch.int32), torch.zeros(padded, dtype=torch.int32)
    exit[:T], positions[:T] = torch.as_tensor(packed.exit), torch.as_tensor(packed.positions)
    made = build_block_mask(exit, positions, None if window is None else torch.tensor(window))

    mask = torch.eye(padded, dtype=torch.bool)
    mask[:T, :T] = DensePlan(packed, torch.device("cpu")).within(window)
    by_block = mask.view(padded // BLOCK, BLOCK, padded // BLOCK, BLOCK).permute(0, 2, 1, 3).flatten(2)
    some, every = by_block.any(-1), by_block.all(-1)
    partial = blocks_of(made.kv_num_blocks, made.kv_indices)
    full = blocks_of(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & full).any()
    assert not (full & ~every).any()  # a block taken whole is visible whole
    assert not (some & ~(partial | full)).any()  # nothing visible is skipped
    if window is None:
        assert torch.equal(partial | full, some)
        assert torch.equal(full, every)

    q, k = torch.meshgrid(torch.arange(padded), torch.arange(padded), indexing="ij")
    assert torch.equal(made.mask_mod(0, 0, q, k), mask)


def test_a_wrong_exit_changes_the_blocks():
    packed = mem1_pack(0)
    exit = torch.zeros(-(-len(packed) // BLOCK) * BLOCK, dtype=torch.int32)
    exit[: len(packed)] = torch.as_tensor(packed.exit)
    before = build_block_mask(exit, torch.zeros_like(exit), None).kv_num_blocks.clone()
    exit[:BLOCK] = BLOCK  # the first block of the shared prefix no longer reaches the later calls
    assert not torch.equal(build_block_mask(exit, torch.zeros_like(exit), None).kv_num_blocks, before)


def test_on_a_cpu_it_says_so():
    with pytest.raises(ValueError, match="no backward pass on the CPU: use attention='dense' or 'cascade'"):
        FlexPlan(mem1_pack(0), torch.device("cpu"))
