"""Runs the model for the engine: kernel by kernel, or on a GPU from CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.engine.local.attention import Groups, Pass, Span, group
from memopd.engine.local.cache import Cache
from memopd.engine.local.sequence import FlatRow
from memopd.models.support import rope_switch

log = logging.getLogger("memopd")

LARGEST_GRAPH = 12288  # rows of a captured pass; larger ones, of very long prompts, keep the GPU busy by themselves
STEPS = 16  # of decoding from a graph before the host reads the tokens, at most


@dataclass(frozen=True, slots=True)
class Row:
    """The inputs of one sequence's next step of decoding."""

    slot: int
    token: int
    position: int
    uniforms: np.ndarray[Any, Any]  # at least as many as the steps to come
    temperature: float
    top_k: int  # 0: off
    top_p: float


class NotCaptured(Exception):
    """The step of this model cannot be captured: it synchronises with the host, or its shapes depend on values."""


class Passes:
    """Of one model, over one cache."""

    def __init__(self, model: Any, cache: Cache, fused: bool) -> None:
        self.model, self.cache = model, cache
        self.device: torch.device = next(model.parameters()).device
        self.fused = False
        self.captures = self.device.type == "cuda"
        self.graphs: Any = None  # a Decoder, once there is something to capture
        self._groups: Groups | None = None  # on a CPU: of the running sequences
        if self.captures and fused:
            from memopd.engine.local.fused import fuse  # imports torch's compiler, which takes seconds

            self.fused = fuse(model)
        if rope_switch(model) is not None:  # such a rope reads positions on the host, in every step
            self.captures = False

    def logits(self, row: FlatRow) -> Tensor:
        """The logits that follow every sequence of `row`, valid until the next pass."""
        if len(row.ids) <= LARGEST_GRAPH and self.can_capture():
            try:
                found: Tensor = self._decoder().logits(row)
                return found
            except NotCaptured as why:
                self._give_up(why)
        return self._one_by_one(row)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Any, Any] | None:
        """`steps` tokens and their log p for every row, step by step; None if the model cannot be captured."""
        try:
            made: tuple[Any, Any] = self._decoder().decode(rows, steps)
            return made
        except NotCaptured as why:
            self._give_up(why)
            return None

    def can_capture(self) -> bool:
        """Whether CUDA graphs can run the passes. A first pass, through every layer, shows it."""
        if not self.captures:
            return False
        if not self.cache.layers:  # one token, in the slot that no sequence uses: sequences' own passes are all alike
            one, slot = np.zeros(1, np.int64), self.cache.slots - 1
            self._one_by_one(FlatRow(one, one, one + slot * self.cache.length, one, [], [Span(slot, 0, 1, 0)]))
        return not self.cache.special

    def regroup(self) -> None:
        """Other sequences run now."""
        self._groups = None

    def release(self) -> None:
        """Free the cache and the graphs."""
        self.graphs = self._groups = None
        self.cache.release()

    def tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _decoder(self) -> Any:
        if self.graphs is None:
            from memopd.engine.local.graphs import Decoder  # imports Triton, which exists only with a GPU

            self.graphs = Decoder(self.model, self.cache, self.fused)
        return self.graphs

    def _give_up(self, why: NotCaptured) -> None:
        log.warning("engine: %s cannot be captured, steps run one by one (%s)", type(self.model).__name__, why)
        self.captures = False

    def _one_by_one(self, row: FlatRow) -> Tensor:
        """The logits of a pass whose kernels are launched one by one."""
        slots, lengths = [s.slot for s in row.running], [s.length for s in row.running]
        if self._groups is None and self.device.type == "cpu":
            self._groups = group(slots, lengths, self.cache.length, self.model.dtype)
        scheme = Pass(
            self.cache,
            self.tensor(row.places),
            spans=[*row.running, *row.entering],
            groups=() if self._groups is None else self._groups.at(slots, lengths),
            alone=row.entering,
        )
        logits: Tensor = self.model(
            input_ids=self.tensor(row.ids)[None],
            position_ids=self.tensor(row.positions)[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=self.tensor(row.last),
            memopd_scheme=scheme,  # not compiled: for few rows, compiled layers cost the host twice as much
        ).logits[0]
        return logits
