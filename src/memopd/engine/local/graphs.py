"""Decoding on a GPU: a step captured once as a CUDA graph, several replayed before the host looks.

A step of a small model is hundreds of tiny kernels; launched one by one from Python they cost ten times what they
compute. The captured step samples too and feeds its token to the next, so that nothing waits for the host. What a
sequence samples past its end, within the steps between two looks, is thrown away; its draws do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memopd.engine.local.attention import Pass
from memopd.engine.local.cache import Cache
from memopd.engine.local.kernel import Tiles
from memopd.engine.local.sampler import draw

STEPS = 16  # between two looks of the host, at most
ALL = 2**31  # more tokens than any vocabulary has


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a decoding batch: what its next step reads."""

    slot: int
    token: int
    position: int
    uniforms: np.ndarray[Any, Any]  # at least as many as the steps to come
    temperature: float
    top_k: int  # 0: off
    top_p: float


class NotCaptured(Exception):
    """This model's step cannot be a graph: it makes the host wait, or chooses shapes from values."""


class Decoder:
    """Graphs of one step, by batch size rounded up to a power of two. They read the model's parameters where they
    lie, so that training in place needs no new capture; parameters that moved do."""

    def __init__(self, model: Any, cache: Cache) -> None:
        self.model, self.cache = model, cache
        rows, device = cache.slots - 1, next(model.parameters()).device
        self.ids = torch.zeros(1, rows, dtype=torch.long, device=device)
        self.positions = torch.zeros(1, rows, dtype=torch.long, device=device)
        self.start = torch.zeros(rows, dtype=torch.long, device=device)
        self.first = torch.arange(rows, dtype=torch.int32, device=device)
        self.one = torch.ones(rows, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(STEPS, rows, dtype=torch.float64, device=device)
        self.temperature = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.long, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.sampled = torch.zeros(2, STEPS, rows, dtype=torch.float64, device=device)  # tokens and log p
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.addresses: list[int] = []  # of the parameters that the graphs read
        self.pool = torch.cuda.graph_pool_handle()  # one for all: what a step leaves behind lies in the buffers above

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Any, Any]:
        """`steps` tokens and their log p for every row: two lists of lists, step by step."""
        size = min(1 << (len(rows) - 1).bit_length(), self.ids.shape[1])
        self._load(rows, size, steps)
        graph = self._graph(size, any(r.top_k or r.top_p < 1 for r in rows))
        self.step.zero_()
        for _ in range(steps):
            graph.replay()
        tokens, logprobs = self.sampled[:, :steps, : len(rows)].cpu()
        return tokens.long().tolist(), logprobs.tolist()

    def _load(self, rows: Sequence[Row], size: int, steps: int) -> None:
        nobody = Row(self.cache.slots - 1, 0, 0, np.zeros(steps), 1.0, 0, 1.0)
        padded = [*rows, *[nobody] * (size - len(rows))]
        columns = [
            [r.token for r in padded],
            [r.position for r in padded],
            [r.slot * self.cache.length for r in padded],
            [r.temperature for r in padded],
            [r.top_k or ALL for r in padded],
            [r.top_p for r in padded],
        ]
        uniforms = np.stack([r.uniforms[:steps] for r in padded], 1)
        # One copy to the device: float64 holds every one of these integers exactly.
        whole = torch.as_tensor(np.concatenate([np.array(columns), uniforms])).to(self.ids.device)
        into = [self.ids[0], self.positions[0], self.start, self.temperature, self.top_k, self.top_p]
        for buffer, column in zip([*into, *self.uniforms[:steps]], whole, strict=True):
            buffer[:size].copy_(column)

    def _graph(self, size: int, cut: bool) -> torch.cuda.CUDAGraph:
        addresses = [p.data_ptr() for p in self.model.parameters()]
        if addresses != self.addresses:
            self.graphs, self.addresses = {}, addresses
        if (size, cut) not in self.graphs:
            self.graphs[size, cut] = self._capture(size, cut)
        return self.graphs[size, cut]

    def _capture(self, size: int, cut: bool) -> torch.cuda.CUDAGraph:
        kept = [x.clone() for x in (self.ids, self.positions)]
        self.step.zero_()
        here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(here)
        with torch.cuda.stream(beside):  # kernels are compiled and libraries set up outside the graph
            self._step(size, cut)
        here.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:  # other threads of the process, a trainer's say, may allocate meanwhile: hence the mode
            capturing = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
            with torch.cuda.stream(here), capturing:  # `here` again afterwards: a capture that fails stays on its own
                self._step(size, cut)
        except RuntimeError as why:
            raise NotCaptured(str(why).splitlines()[0]) from why
        for buffer, before in zip((self.ids, self.positions), kept, strict=True):
            buffer.copy_(before)  # what the step outside the graph wrote into the cache, the first replay writes again
        return graph

    def _step(self, size: int, cut: bool) -> None:
        ids, positions, start = self.ids[:, :size], self.positions[:, :size], self.start[:size]
        tiles = Tiles(self.first[:size], self.one[:size], start, positions[0], 1)
        now = Pass(self.cache, start + positions[0], spans=(), tiles=tiles)
        logits = self.model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, memopd_scheme=now
        ).logits[0]
        uniform = self.uniforms.index_select(0, self.step)[0, :size]
        filters = (self.top_k[:size], self.top_p[:size]) if cut else (None, None)
        token, logprob = draw(logits, uniform, self.temperature[:size], *filters)
        self.sampled[0, :, :size].index_copy_(0, self.step, token.double()[None])
        self.sampled[1, :, :size].index_copy_(0, self.step, logprob[None])
        ids.copy_(token[None])
        positions.add_(1).clamp_(max=self.cache.length - 1)  # past its end a sequence only overwrites itself
        self.step.add_(1)
