"""Trie attention by variable-length FlashAttention calls: no mask, no row computed twice, exact gradients.

A *node* is a run of rows without a branch. A row sees the rows of its own node up to itself and all rows of the
nodes above. Two layouts compute this; both are lists of passes over segments (`varlen`).

    paths   one pass. Every node's rows are the queries of a segment whose keys are the whole path down to it,
            gathered: [ancestors, own rows], causal, aligned at the end. No merging; keys of a shared prefix are
            copied once per node below it (keys only: with grouped queries they are a small part of the model).
    levels  one pass per level. Pass 0: every node's own rows, causal. Pass l: all rows below a node at level l - 1
            against that node's rows. Nothing is copied; outputs are merged by their log-sum-exp in float32.

Paths are faster nearly everywhere. If very many short nodes are below a long prefix, copies and half-empty tiles cost
more than merging, and levels are faster: see `choose_layout`. On a GPU, flex is faster still on large
tries of this kind, and `auto` uses it (`plan.choose_attention`); on a CPU nothing is faster than levels there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd.attention import varlen
from memopd.attention.copies import Copies
from memopd.attention.varlen import Segments
from memopd.compile import Packed
from memopd.models.attention import Layer


@dataclass(frozen=True, slots=True)
class Node:
    start: int  # own rows start .. stop - 1
    stop: int
    exit: int  # rows below: stop .. exit - 1
    above: tuple[int, ...]  # the nodes above, root first


def nodes_of(exit: NDArray[Any]) -> list[Node]:
    """The trie's nodes from its exits, in the order of their rows."""
    # A row continues the node of the row before it when it is that row's only child.
    follows = (exit[1:] == exit[:-1]) & (exit[:-1] > np.arange(1, len(exit)))
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist()]
    stops = [*starts[1:], len(exit)]
    nodes: list[Node] = []
    above: list[int] = []
    for start, stop in zip(starts, stops, strict=True):
        while above and nodes[above[-1]].exit <= start:
            above.pop()
        nodes.append(Node(start, stop, int(exit[start]), tuple(above)))
        above.append(len(nodes) - 1)
    return nodes


@dataclass(frozen=True, slots=True)
class Pass:
    """One call of the kernel: the rows of its queries and of its keys (None: all rows, in order), and its segments."""

    queries: Copies | None
    keys: Copies | None
    segments: Segments

    def tensors(self) -> list[Tensor]:
        """A flat list, as a custom operator needs it; `passes_of` is the inverse."""
        none = (torch.empty(0, dtype=torch.int64),) * 3
        queries = none if self.queries is None else (self.queries.index, self.queries.order, self.queries.start)
        keys = none if self.keys is None else (self.keys.index, self.keys.order, self.keys.start)
        return [*queries, *keys, self.segments.cu_q, self.segments.cu_k, self.segments.shape]


def passes_of(tensors: Sequence[Tensor]) -> list[Pass]:
    passes = []
    for at in range(0, len(tensors), 9):
        q, k, segments = tensors[at : at + 3], tensors[at + 3 : at + 6], tensors[at + 6 : at + 9]
        passes.append(Pass(Copies(*q) if len(q[0]) else None, Copies(*k) if len(k[0]) else None, Segments(*segments)))
    return passes


def path_pass(nodes: Sequence[Node], device: torch.device) -> list[Pass]:
    keys = [np.concatenate([_rows(nodes[a]) for a in (*n.above, i)]) for i, n in enumerate(nodes)]
    segments = Segments.of(_sizes(nodes), np.array([len(k) for k in keys]), True, device)
    branching = any(n.above for n in nodes)
    return [Pass(None, _copies(keys, nodes, device) if branching else None, segments)]


def level_passes(nodes: Sequence[Node], device: torch.device) -> list[Pass]:
    own = _sizes(nodes)
    passes = [Pass(None, None, Segments.of(own, own, True, device))]
    for level in range(max(len(n.above) for n in nodes)):
        parents = [n for n in nodes if len(n.above) == level and n.exit > n.stop]
        below = np.array([n.exit - n.stop for n in parents])
        passes.append(
            Pass(
                _copies([np.arange(n.stop, n.exit) for n in parents], nodes, device),
                _copies([_rows(n) for n in parents], nodes, device),
                Segments.of(below, _sizes(parents), False, device),
            )
        )
    return passes


def _rows(node: Node) -> NDArray[np.int64]:
    return np.arange(node.start, node.stop)


def _sizes(nodes: Sequence[Node]) -> NDArray[np.int64]:
    return np.array([n.stop - n.start for n in nodes])


def _copies(rows: Sequence[NDArray[Any]], nodes: Sequence[Node], device: torch.device) -> Copies:
    return Copies.of(np.concatenate(rows), nodes[-1].stop, device)


# Milliseconds, forward + backward, fitted to `python -m benchmarks attention` (H200, bf16, 16 query and 2 key-value
# heads of 128): only their proportions matter.
TILE = 128  # queries that a block of the kernel computes at once, whether or not all are needed
PER_SCORE = 0.068e-6
PER_KEY = 0.013e-3  # per gathered key
PER_LEVEL = {"cuda": 0.5, "cpu": 0.23}  # on a GPU mostly launches, so it depends on the host: 0.5 to 0.9 measured
PER_MERGE = 0.108e-3  # per query row of a level


def choose_layout(nodes: Sequence[Node], device: str = "cuda") -> tuple[str, str]:
    """(layout, why): the layout with the lower estimated cost. With a lower cost per level, this fits a CPU too."""
    levels = max(len(n.above) for n in nodes)
    if levels == 0:
        return "paths", "no branch"
    own = _sizes(nodes)
    below = np.array([n.exit - n.stop for n in nodes])
    per_level = PER_LEVEL.get(device, PER_LEVEL["cpu"])
    by_paths = paths_cost(nodes)
    by_levels = PER_SCORE * ((_tiles(own) + _tiles(below)) * own).sum() + per_level * levels + PER_MERGE * below.sum()
    why = f"about {by_paths:.2g} ms per layer against {by_levels:.2g} by levels"
    return ("paths" if by_paths <= by_levels else "levels"), why


def paths_cost(nodes: Sequence[Node]) -> float:
    """The estimated milliseconds per layer by paths."""
    own = _sizes(nodes)
    path = np.array([sum(own[a] for a in n.above) for n in nodes]) + own
    return float(PER_SCORE * (_tiles(own) * path).sum() + PER_KEY * path.sum())


def _tiles(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-rows // TILE) * TILE


class CascadePlan:
    keep: ClassVar[bool] = True

    def __init__(self, packed: Packed, device: torch.device, layout: str | None = None, windowed: bool = False) -> None:
        nodes = nodes_of(packed.exit)
        self.longest = int(packed.positions.max()) + 1
        self.layout, self.why = choose_layout(nodes, device.type) if layout is None else (layout, "asked for")
        self.traceable = self.layout == "paths"  # a trie has any number of levels, and each would be another graph
        make = {"paths": path_pass, "levels": level_passes}
        # A window is measured along a whole path, which only the layout "paths" has in one segment.
        needed = {self.layout, "paths"} if windowed else {self.layout}
        self.passes = {name: [t for p in make[name](nodes, device) for t in p.tensors()] for name in needed}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        if layer.softcap is not None:
            raise ValueError("cascade attention has no kernel for soft caps: use attention='flex' or 'dense'")
        window = None if layer.window is None or layer.window >= self.longest else layer.window
        varlen.check_supported(query, value, window)
        passes = self.passes[self.layout if window is None else "paths"]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, d], the order in memory
        return cascade(q, k, v, layer.sinks, passes, layer.scale, window or 0)[0][None]


# Custom operators: to a compiler each is one opaque step, so that the model around them compiles as one graph.


@torch.library.custom_op("memopd::cascade", mutates_args=())
def cascade(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, passes: Sequence[Tensor], scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, d], k and v [T, Hkv, d], sinks [Hq], passes as `Pass.tensors`, window 0 for none.

    -> output [T, Hq, d] and log-sum-exp [Hq, T]
    """
    parts = []
    for p in passes_of(passes):
        qp, kp, vp = _take(q, p.queries), _take(k, p.keys), _take(v, p.keys)
        parts.append((p.queries, *varlen.forward(qp, kp, vp, p.segments, scale, window or None)))
    if len(parts) == 1 and sinks is None:
        return parts[0][1].contiguous(), parts[0][2].contiguous()
    return merge(parts, sinks)


@torch.library.custom_op("memopd::cascade_backward", mutates_args=())
def cascade_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    passes: Sequence[Tensor], scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Every pass uses the *merged* output and log-sum-exp, so that the parts sum to the gradient of the whole."""
    dq = dk = dv = None
    for p in passes_of(passes):
        lp = lse if p.queries is None else lse[:, p.queries.index].contiguous()
        g, qp, op = (_take(x, p.queries) for x in (grad, q, out))
        kp, vp = _take(k, p.keys), _take(v, p.keys)
        parts = varlen.backward(g, qp, kp, vp, op, lp, p.segments, scale, window or None)
        dq = _add(dq, p.queries, parts[0])
        dk = _add(dk, p.keys, parts[1])
        dv = _add(dv, p.keys, parts[2])
    assert dq is not None
    assert dk is not None
    assert dv is not None
    dsinks = lse.new_zeros(0)
    if sinks is not None:
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # [H, T], the sink's share of each row
        row = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
        dsinks = -(share * row).sum(1)
    return *(x.to(y.dtype).contiguous() for x, y in ((dq, q), (dk, k), (dv, v))), dsinks  # type: ignore[return-value]


@cascade.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, passes: Sequence[Tensor], scale: float, window: int
) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=precise)


@cascade_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    passes: Sequence[Tensor], scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsinks = lse.new_empty(0 if sinks is None else len(sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, passes, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, *passes)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, *passes = ctx.saved_tensors
    dq, dk, dv, dsinks = cascade_backward(grad.contiguous(), q, k, v, out, lse, sinks, passes, ctx.scale, ctx.window)
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, dsinks, [None] * len(passes), None, None


cascade.register_autograd(_gradients, setup_context=_save)


def merge(parts: Sequence[tuple[Copies | None, Tensor, Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge outputs over disjoint sets of keys, weighted by their log-sum-exps, in at least float32.

    A row that is not in a part has no keys there: its log-sum-exp is −∞ and its weight 0. A sink adds to the
    log-sum-exp and has no value.
    """
    _, first, first_lse = parts[0]
    assert parts[0][0] is None  # the first part holds every row
    lse = first_lse
    for held, _, part in parts[1:]:
        assert held is not None
        lse = lse.index_copy(1, held.index, torch.logaddexp(lse[:, held.index], part))
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    out = first.to(lse.dtype) * (first_lse - lse).exp().T[:, :, None]
    for held, o, part in parts[1:]:
        assert held is not None
        weight = (part - lse[:, held.index]).exp().T[:, :, None]
        out.index_add_(0, held.index, o.to(lse.dtype) * weight)  # every row at most once
    return out.to(first.dtype), lse


def _take(x: Tensor, rows: Copies | None) -> Tensor:
    return x if rows is None else rows.take(x)


def _add(total: Tensor | None, rows: Copies | None, part: Tensor) -> Tensor:
    """The gradient of a shared row is a sum over its uses: within a pass by `Copies`, over passes in float32."""
    part = part if rows is None else rows.sum(part)
    if total is None:
        return part
    return total.to(torch.promote_types(total.dtype, torch.float32)).add_(part)
