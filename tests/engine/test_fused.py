"""The fused layers of the engine: the same numbers as the layers by themselves, one compilation for all of them.

Here torch.compile's "eager" backend runs what was captured; tests/gpu runs the compiled kernels.
"""

from functools import cache

import pytest
import torch

from memopd.engine.local import fused as fused_module
from memopd.engine.local.attention import Pass, Span
from memopd.engine.local.cache import Cache
from memopd.engine.local.fused import fuse
from memopd.models import compiled as compiled_module
from memopd.models.attention import sampling_attention
from memopd.models.compiled import Opaque
from memopd.verify.families import tiny_model


@pytest.fixture
def captured(monkeypatch):
    """The graphs that torch.compile captured."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compile_it = cache(lambda function: torch.compile(function, dynamic=True, backend=backend))
    for module in (fused_module, compiled_module):
        monkeypatch.setattr(module, "compiled", compile_it)
    return graphs


def logits(model, size, fused=False):
    with sampling_attention(model):
        rows = torch.arange(size)
        spans = [Span(slot=0, first=0, count=size, position=0)]
        scheme = Pass(Cache(1, 16), rows, spans=spans, alone=spans)
        return model(
            input_ids=rows[None],
            position_ids=rows[None],
            use_cache=False,
            memopd_scheme=Opaque(scheme) if fused else scheme,
        ).logits


@pytest.mark.slow
def test_fused_layers_compute_the_same_with_one_compilation_for_all_layers_and_sizes(captured):
    model = tiny_model("qwen2").to(torch.bfloat16)
    assert fuse(model)
    before = len(captured)
    for size in (1, 2, 5, 16):
        assert torch.equal(logits(model, size), logits(model, size, fused=True))
    assert len(captured) == before  # `fuse` compiled all of them


def test_layers_that_cannot_be_compiled_are_left_as_they_are(monkeypatch, caplog):
    def refuse(function):
        def raises(*_, **__):
            raise RuntimeError("no compiler here")

        return raises

    monkeypatch.setattr(compiled_module, "compiled", refuse)
    model = tiny_model("qwen2")
    with caplog.at_level("WARNING"):
        assert not fuse(model)
    assert "no compiler here" in caplog.text
    assert torch.isfinite(logits(model, 4)).all()
