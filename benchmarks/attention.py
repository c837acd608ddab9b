"""Attention alone, forward and backward, on tries of depth 2 to 8 and 1 k to 64 k rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.timing import measure
from memopd.attention.cascade import CascadePlan, nodes_of
from memopd.attention.dense import DensePlan
from memopd.attention.flex import FlexPlan
from memopd.compile import Packed, compile_calls
from memopd.models.attention import Layer
from memopd.types import Call

DENSE_UP_TO = 16_384  # rows; beyond, one mask alone takes gigabytes


@dataclass(frozen=True, slots=True)
class AttentionResult:
    trie: str
    rows: int
    depth: int
    leaves: int
    kernel: str
    chosen: bool  # what "cascade" takes by itself
    seconds: float
    spread: float
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trie_of(rows: int, depth: int, leaves: int, seed: int = 0) -> Packed:
    """A trie of about `rows` rows whose paths branch at `depth` - 1 places, `leaves` calls in all."""
    rng = np.random.default_rng(seed)
    fan = max(2, round(leaves ** (1 / (depth - 1))))
    nodes = sum(fan**level for level in range(depth))
    size = max(1, rows // nodes)
    prefixes = [rng.integers(0, 1000, size)]
    for _ in range(depth - 1):
        prefixes = [np.concatenate([p, [i], rng.integers(0, 1000, size - 1)]) for p in prefixes for i in range(fan)]
    return compile_calls([Call(p, np.zeros(1, np.int32)) for p in prefixes])


def thin_trie(rows: int, leaves: int, seed: int = 0) -> Packed:
    """Many short calls under one long prefix: three quarters of the rows are shared by all."""
    rng = np.random.default_rng(seed)
    prefix, size = rng.integers(0, 1000, 3 * rows // 4), max(1, rows // 4 // leaves)
    prompts = [np.concatenate([prefix, [i], rng.integers(0, 1000, size - 1)]) for i in range(leaves)]
    return compile_calls([Call(p, np.zeros(1, np.int32)) for p in prompts])


def run_attention(
    packed: Packed, trie: str, dtype: torch.dtype, device: str, repeats: int, heads: int = 16, kv_heads: int = 2,
    dim: int = 128,
) -> list[AttentionResult]:  # fmt: skip
    """By default at Qwen2.5-3B's attention: 16 query heads, 2 key-value heads, dimension 128."""
    where = torch.device(device)
    T, leaves = len(packed), len(np.unique(packed.decisions.call))
    depth = max(len(n.above) for n in nodes_of(packed.exit)) + 1
    make = {
        "dense": lambda: DensePlan(packed, where),
        "flex": lambda: FlexPlan(packed, where),
        "cascade, levels": lambda: CascadePlan(packed, where, "levels"),
        "cascade, paths": lambda: CascadePlan(packed, where, "paths"),
    }
    chosen = f"cascade, {CascadePlan(packed, where).layout}"
    q, k, v = (torch.randn(1, h, T, dim, device=device).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    g = torch.randn(1, T, heads, dim, device=device).to(dtype)
    results = []
    for name, plan_of in make.items():
        if name == "dense" and T > DENSE_UP_TO:
            continue
        try:
            plan: Any = plan_of()

            def step(plan: Any = plan) -> None:
                out = plan.attend(q, k, v, Layer(dim**-0.5))
                torch.autograd.grad(out, (q, k, v), g)

            m = measure(step, repeats)
            results.append(AttentionResult(trie, T, depth, leaves, name, name == chosen, m.seconds, m.spread))
        except (ValueError, torch.OutOfMemoryError) as why:
            results.append(
                AttentionResult(trie, T, depth, leaves, name, name == chosen, float("nan"), 0, str(why)[:90])
            )
    return results


def sweep(
    rows: Sequence[int],
    depths: Sequence[int],
    leaves: Sequence[int],
    dtype: torch.dtype,
    device: str,
    repeats: int,
) -> Iterator[AttentionResult]:
    seen = set()
    for n in rows:
        for calls in leaves:
            if n < 8 * calls:
                continue
            for depth in depths:
                packed = trie_of(n, depth, calls)
                if (shape := (n, depth, len(packed.decisions))) not in seen:  # deep tries come in few sizes
                    seen.add(shape)
                    yield from run_attention(packed, "balanced", dtype, device, repeats)
            yield from run_attention(thin_trie(n, calls), "thin", dtype, device, repeats)
