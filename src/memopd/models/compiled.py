"""Fuses the small operations of a model's layers, for sampling and training on a GPU.

A layer of a small model is forty kernels, most of which normalise, rotate or add. In sampling, starting them takes
longer than computing them; in training, each reads and writes all rows again. torch.compile makes about a dozen of
them. It keeps every rounding of the uncompiled layer (`emulate_precision_casts`) and chooses its kernels without
measuring (`deterministic`), so that a repeated run computes the same.

A scheme says with an attribute `traceable` that torch.compile may follow it; then a layer is one graph. Any other
scheme is wrapped in `Opaque` and stays outside, which cuts a layer into six graphs: the host then takes a quarter to
a half longer to start it (`python -m benchmarks host`).

A prepared model still runs as it is: a pass is compiled only if its scheme is `Opaque` or traceable. Compiling takes
half a minute once, and some seconds when torch's cache on disk has the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from memopd.models.attention import Layer, Scheme
from memopd.models.load import backbone

log = logging.getLogger("memopd")

GRAPHS = 64  # of one layer: with and without gradients, for every adapter and for every model of a run


class Opaque:
    """A scheme that torch.compile calls as it is."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
        return self._scheme.attend(query, key, value, layer)


@cache
def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works on this machine; if not, a warning says why."""
    try:
        compiled(_probe)(torch.zeros(13, device=device))
    except (RuntimeError, OSError, ImportError) as why:
        log.warning("torch.compile does not work here, layers run as they are (%s)", str(why).strip().splitlines()[0])
        return False
    return True


def _probe(x: Tensor) -> Tensor:
    return x.sin() + 1


def prepare_layers(model: Any) -> None:
    """From now on, passes with an `Opaque` or a traceable scheme run compiled layers."""
    for layer in _layers(model):
        layer.forward = partial(_forward, layer)


def scheme_for(model: Any, scheme: Scheme) -> Scheme:
    """`scheme` as the passes of `model` take it: compiled if its layers are prepared."""
    layers = _layers(model)
    is_prepared = bool(layers) and "forward" in vars(layers[0])
    return Opaque(scheme) if is_prepared and not _is_compiled(scheme) else scheme


def _is_compiled(scheme: Any) -> bool:
    return isinstance(scheme, Opaque) or getattr(scheme, "traceable", False)


def _layers(model: Any) -> list[Any]:
    return list(getattr(backbone(model), "layers", ()))


def _forward(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    forward = type(layer).forward
    if _is_compiled(keywords.get("memopd_scheme")):
        forward = compiled(forward)
    return forward(layer, *arguments, **keywords)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for all batch sizes, compiled when it is first called."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor  # imports torch's compiler, which takes seconds

    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    wanted = ("emulate_precision_casts", "deterministic")  # the latter is newer than the oldest torch that we support
    options: dict[str, Any] = {name: True for name in wanted if hasattr(inductor, name)}
    return torch.compile(function, dynamic=True, options=options)
