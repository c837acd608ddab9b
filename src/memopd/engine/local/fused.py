"""Fuses the small operations of a model's layers, for sampling on a GPU.

A layer of a small model is forty kernels, most of which normalise, rotate or add a few thousand numbers: starting them
takes longer than computing them. torch.compile makes about a dozen of them. It keeps every rounding of the unfused
layer (`emulate_precision_casts`) and chooses its kernels without measuring (`deterministic`), so that a repeated run
computes the same. Attention stays outside, because the cache is written there.

Compiling takes half a minute once, and some seconds when torch's cache on disk has the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor

from memopd.engine.local.attention import Pass, Span
from memopd.engine.local.cache import Cache
from memopd.engine.local.sampler import draw
from memopd.models.attention import Layer, Scheme, sampling_attention
from memopd.models.load import backbone

log = logging.getLogger("memopd")


class Fused:
    """The layers of `model`, compiled. They are fused only inside the blocks below, so a trainer can use the model too.

    Give the model `opaque(scheme)` there: torch.compile calls its attention as it is.
    """

    def __init__(self, model: Any) -> None:
        self._layers = list(getattr(backbone(model), "layers", ()))

    @contextmanager
    def layers(self) -> Iterator[None]:
        for layer in self._layers:
            layer.forward = partial(compiled(type(layer).forward), layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def opaque(self, scheme: Scheme) -> Scheme:
        return _Opaque(scheme)


def fuse(model: Any) -> Fused | None:
    """Compile the layers, and try them. None, with a warning, for a model whose layers cannot be compiled."""
    log.info("engine: fusing the layers of %s, which takes up to a minute once", type(model).__name__)
    made, device = Fused(model), next(model.parameters()).device
    try:
        with sampling_attention(model):
            for size in (
                1,
                13,
            ):  # 1 is compiled by itself; 13, which no other dimension has, stands for all other sizes
                rows = torch.arange(size, device=device)
                spans = [Span(slot=0, first=0, count=size, position=0)]
                with made.layers():
                    logits = model(
                        input_ids=rows[None],
                        position_ids=rows[None],
                        attention_mask=None,
                        use_cache=False,
                        memopd_scheme=made.opaque(Pass(Cache(1, 13), rows, spans=spans, alone=spans)),
                    ).logits[0]
                half = torch.full((size,), 0.5, dtype=torch.float64, device=device)
                compiled(draw)(logits, half, half)
    except (TorchDynamoException, RuntimeError, OSError) as why:  # no compiler on the machine, or an unusual layer
        log.warning("engine: the layers are not fused (%s)", str(why).strip().splitlines()[0])
        return None
    return made


class _Opaque:
    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        return self._scheme.attend(query, key, value, layer)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for all batch sizes, compiled when it is first called."""
    wanted = ("emulate_precision_casts", "deterministic")  # the latter is newer than the oldest torch that we support
    options: dict[str, Any] = {name: True for name in wanted if hasattr(inductor, name)}
    return torch.compile(function, dynamic=True, options=options)
