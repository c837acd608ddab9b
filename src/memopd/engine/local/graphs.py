"""Decoding on a GPU: one step is captured as a CUDA graph and replayed several times before the host reads the tokens.

A step of a small model is hundreds of tiny kernels; launching them one by one from Python takes ten times as long as
they compute. The captured step also samples a token and feeds it to the next step, so that no step waits for the host.
The engine discards the tokens that a sequence samples past its end before the host reads them; the draws of other
steps do not depend on these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.engine.local.attention import Pass
from memopd.engine.local.cache import Cache
from memopd.engine.local.kernel import Tiles
from memopd.engine.local.passes import STEPS, NotCaptured, Row
from memopd.engine.local.prompts import PromptGraphs
from memopd.engine.local.sampler import draw
from memopd.engine.local.sequence import FlatRow
from memopd.models.attention import Scheme
from memopd.models.compiled import Opaque, compiled

ALL = 2**31  # more tokens than any vocabulary has


class Decoder:
    """Graphs of one step, one per batch size rounded up to a power of two.

    The graphs read the model's parameters in place, so that training in place needs no new capture. Parameters that
    moved to another address do.
    """

    def __init__(self, model: Any, cache: Cache, fused: bool = False) -> None:
        self.model, self.cache, self.fused = model, cache, fused
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
        self.pool = torch.cuda.graph_pool_handle()  # graphs can share it, as all results are in the buffers above
        self.prompts = PromptGraphs(model, cache, self.capture, fused)

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
        padding = Row(self.cache.slots - 1, 0, 0, np.zeros(steps), 1.0, 0, 1.0)  # in the slot that no sequence uses
        padded = [*rows, *[padding] * (size - len(rows))]
        columns = [
            [r.token for r in padded],
            [r.position for r in padded],
            [r.slot * self.cache.length for r in padded],
            [r.temperature for r in padded],
            [r.top_k or ALL for r in padded],
            [r.top_p for r in padded],
        ]
        uniforms = np.stack([r.uniforms[:steps] for r in padded], 1)
        # A single copy to the device: float64 represents all of these integers exactly.
        whole = torch.as_tensor(np.concatenate([np.array(columns), uniforms])).to(self.ids.device)
        into = [self.ids[0], self.positions[0], self.start, self.temperature, self.top_k, self.top_p]
        for buffer, column in zip([*into, *self.uniforms[:steps]], whole, strict=True):
            buffer[:size].copy_(column)

    def logits(self, row: FlatRow) -> Tensor:
        """The logits of a pass in which prompts enter, one row per sequence; valid until the next pass."""
        self._check_addresses()
        return self.prompts.run(row)

    def _check_addresses(self) -> None:
        addresses = [p.data_ptr() for p in self.model.parameters()]
        if addresses != self.addresses:
            self.graphs, self.prompts.graphs, self.addresses = {}, {}, addresses

    def _graph(self, size: int, cut: bool) -> torch.cuda.CUDAGraph:
        self._check_addresses()
        if (size, cut) not in self.graphs:
            kept = [x.clone() for x in (self.ids, self.positions)]
            self.step.zero_()
            self.graphs[size, cut] = self.capture(lambda: self._step(size, cut))
            for buffer, before in zip((self.ids, self.positions), kept, strict=True):
                buffer.copy_(before)  # the first replay overwrites what the step outside the graph wrote to the cache
        return self.graphs[size, cut]

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):  # compiles kernels and initialises libraries outside the graph
            step()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:  # thread_local, because other threads of the process, such as a trainer's, may allocate meanwhile
            capturing = torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local")
            with torch.cuda.stream(main), capturing:  # restores `main`: a failed capture would leave its own stream set
                step()
        except RuntimeError as why:
            raise NotCaptured(str(why).splitlines()[0]) from why
        return graph

    def _step(self, size: int, cut: bool) -> None:
        ids, positions, start = self.ids[:, :size], self.positions[:, :size], self.start[:size]
        tiles = Tiles(self.first[:size], self.one[:size], start, positions[0], 1)
        now: Scheme = Pass(self.cache, start + positions[0], spans=(), tiles=tiles)
        logits = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            memopd_scheme=Opaque(now) if self.fused else now,
        ).logits[0]
        uniform = self.uniforms.index_select(0, self.step)[0, :size]
        filters = (self.top_k[:size], self.top_p[:size]) if cut else (None, None)
        pick = compiled(draw) if self.fused else draw
        token, logprob = pick(logits, uniform, self.temperature[:size], *filters)
        self.sampled[0, :, :size].index_copy_(0, self.step, token.double()[None])
        self.sampled[1, :, :size].index_copy_(0, self.step, logprob[None])
        ids.copy_(token[None])
        positions.add_(1).clamp_(max=self.cache.length - 1)  # past its end a sequence only overwrites its own slot
        self.step.add_(1)
