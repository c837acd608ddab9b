"""Tries whether the layers of a model can be compiled for sampling (memopd.models.compiled)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from memopd.engine.local.attention import Pass, Span
from memopd.engine.local.cache import Cache
from memopd.engine.local.sampler import draw
from memopd.models.attention import sampling_attention
from memopd.models.compiled import Opaque, compiled, prepare_layers

log = logging.getLogger("memopd")


def fuse(model: Any) -> bool:
    """Compile the layers, and try them. False, with a warning, for a model whose layers cannot be compiled."""
    log.info("engine: fusing the layers of %s, which takes up to a minute once", type(model).__name__)
    device = next(model.parameters()).device
    prepare_layers(model)
    try:
        with sampling_attention(model):
            for size in (1, 13):  # 1 is compiled by itself; 13, which no other dimension has, stands for other sizes
                rows = torch.arange(size, device=device)
                spans = [Span(slot=0, first=0, count=size, position=0)]
                logits = model(
                    input_ids=rows[None],
                    position_ids=rows[None],
                    attention_mask=None,
                    use_cache=False,
                    memopd_scheme=Opaque(Pass(Cache(1, 13), rows, spans=spans, alone=spans)),
                ).logits[0]
                half = torch.full((size,), 0.5, dtype=torch.float64, device=device)
                compiled(draw)(logits, half, half)
    except (TorchDynamoException, RuntimeError, OSError) as why:  # no compiler on the machine, or an unusual layer
        log.warning("engine: the layers are not fused (%s)", str(why).strip().splitlines()[0])
        return False
    return True
