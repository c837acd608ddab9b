"""Cascade attention against the dense mask, in float64: same numbers, forward and backward."""

import random

import numpy as np
import pytest
import torch

from memopd.attention.cascade import CascadePlan, choose_layout, nodes_of
from memopd.attention.copies import Copies
from memopd.attention.dense import DensePlan
from memopd.compile import Packed, compile_calls
from memopd.models.attention import Layer
from memopd.types import Call

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


def random_trie(seed: int, depth: int) -> Packed:
    """Calls that leave earlier ones at random places: branches nest up to `depth` deep."""
    rng = random.Random(seed)
    paths = [[rng.randrange(9) for _ in range(rng.randint(1, 6))]]
    for _ in range(rng.randint(0, depth)):
        base = paths[-1] if rng.random() < 0.7 else rng.choice(paths)
        keep = rng.randint(max(1, len(base) - 3), len(base))
        paths.append(base[:keep] + [rng.randrange(9) for _ in range(rng.randint(1, 5))])
        if rng.random() < 0.2:
            paths.append([rng.randrange(9) for _ in range(rng.randint(1, 5))])  # another tree
    return compile_calls([Call(p, [0]) for p in paths])


def attend(plan, packed, seed, sinks=False, window=None, dtype=torch.float64):
    """(output, dq, dk, dv[, dsinks])"""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    T = len(packed)
    q, k, v = (randn(1, h, T, DIM).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [q, k, v] + ([randn(HEADS).requires_grad_()] if sinks else [])
    out = plan.attend(q, k, v, Layer(SCALE, window, sinks=leaves[3] if sinks else None))
    return [out.detach(), *torch.autograd.grad(out, leaves, randn(1, T, HEADS, DIM))]


def relative(a, b):
    """The largest difference, over the largest number there is (a window of 1 leaves no gradient for keys)."""
    scale = max(float(y.abs().max()) for y in b)
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) / scale


def test_500_random_tries_agree_with_the_dense_mask():
    deepest = 0
    for seed in range(500):
        packed = random_trie(seed, depth=12)
        deepest = max(deepest, max(len(n.above) for n in nodes_of(packed.exit)) + 1)
        sinks = seed % 2 == 1
        expected = attend(DensePlan(packed, CPU), packed, seed, sinks)
        for layout in ("levels", "paths"):
            actual = attend(CascadePlan(packed, CPU, layout), packed, seed, sinks)
            assert relative(actual, expected) <= 1e-12, (seed, layout)
    assert deepest >= 8


@pytest.mark.parametrize("window", [1, 3, 7, 10_000])
def test_windows_are_counted_along_the_path(window):
    for seed in range(40):
        packed = random_trie(seed, depth=6)
        expected = attend(DensePlan(packed, CPU), packed, seed, window=window)
        actual = attend(CascadePlan(packed, CPU, "levels", windowed=True), packed, seed, window=window)
        assert relative(actual, expected) <= 1e-12


def test_a_wrong_exit_is_seen():
    """The comparison can fail: one row's subtree cut short gives other numbers."""
    packed = compile_calls([Call([1, 2, 3, 4], [5, 6]), Call([1, 2, 7, 8], [9, 9])])
    wrong = packed.exit.copy()
    wrong[1] = 4
    broken = Packed(packed.tokens, packed.positions, wrong, packed.decisions)
    expected = attend(DensePlan(packed, CPU), packed, 0)
    assert relative(attend(CascadePlan(broken, CPU, "levels"), packed, 0), expected) > 1e-3


def test_nodes_of_the_worked_example():
    # q q a a | b b b: rows 0..1 shared, then two branches
    packed = compile_calls([Call([7, 8, 1, 2], [0]), Call([7, 8, 3, 4, 5], [0])])
    assert [(n.start, n.stop, n.exit, n.above) for n in nodes_of(packed.exit)] == [
        (0, 2, 7, ()),
        (2, 4, 4, (0,)),
        (4, 7, 7, (0,)),
    ]


def test_an_append_only_episode_is_one_node_and_one_causal_call():
    packed = compile_calls([Call([1, 2], [3, 4]), Call([1, 2, 3, 4, 5], [6, 7]), Call([1, 2, 3, 4, 5, 6, 7], [8])])
    assert len(nodes_of(packed.exit)) == 1
    plan = CascadePlan(packed, CPU)
    assert (plan.layout, plan.why) == ("paths", "no branch")


def test_layout_is_chosen_by_the_shape_of_the_trie():
    """Paths for long nodes, levels where many short nodes hang under a long prefix."""
    long_nodes = compile_calls([Call([*range(700), *([i] * 500)], [0]) for i in range(16)])
    assert choose_layout(nodes_of(long_nodes.exit))[0] == "paths"
    thin = compile_calls([Call([*range(4000), i, i, i], [0]) for i in range(512)])
    layout, why = choose_layout(nodes_of(thin.exit))
    assert layout == "levels"
    assert "ms per layer" in why


def test_soft_caps_are_refused_with_the_alternative():
    packed = compile_calls([Call([1, 2], [3])])
    x = torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match="soft caps: use attention='flex' or 'dense'"):
        CascadePlan(packed, CPU).attend(x, x, x, Layer(1.0, softcap=50.0))


def test_lower_precisions_stay_near_float64():
    packed = random_trie(3, depth=8)
    exact = attend(DensePlan(packed, CPU), packed, 0)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        for layout in ("levels", "paths"):
            rough = attend(CascadePlan(packed, CPU, layout), packed, 0, dtype=dtype)
            assert relative([x.double() for x in rough], exact) < bound


def test_the_operators_keep_the_contract_of_custom_operators():
    """Shapes, strides and gradients as declared to the compiler."""
    packed = random_trie(5, depth=8)
    plan = CascadePlan(packed, CPU, "levels")
    T = len(packed)
    q, k, v = (torch.randn(T, h, DIM, dtype=torch.float64, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS))
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    arguments = (q, k, v, sinks, plan.passes["levels"], SCALE, 0)
    found = torch.library.opcheck(torch.ops.memopd.cascade.default, arguments)
    assert len(found) >= 4
    assert set(found.values()) == {"SUCCESS"}


def test_copies_take_and_sum_are_adjoint():
    rng = np.random.default_rng(0)
    index = rng.integers(0, 7, 30)
    copies = Copies.of(index, 9, CPU)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    assert torch.equal(copies.take(x), x[torch.as_tensor(index)])
    assert torch.allclose((copies.take(x) * y).sum(), (x * copies.sum(y)).sum())
    assert not copies.sum(y)[7:].any()  # rows without a copy
