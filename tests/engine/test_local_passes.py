"""How the engine runs its model: from graphs where these can be captured, one by one where not; here on a CPU."""

import logging
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from test_local_prompts import PlainTiles, captured

from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.local.attention import Pass
from memopd.engine.local.passes import NotCaptured
from memopd.engine.local.prompts import PromptGraphs
from memopd.engine.local.sampler import draw
from memopd.types import Sampling
from memopd.verify.families import VOCABULARY, tiny_model

LENGTH = 200  # of a slot, as test_local_prompts has it


class PlainDecoder:
    """graphs.Decoder without graphs: the same inputs, and plain products."""

    def __init__(self, model, cache, fused):
        self.model, self.cache = model, cache
        self.prompts = PromptGraphs(model, cache, captured, fused)
        self.passes = self.steps = 0

    def logits(self, row):
        self.passes += 1
        return self.prompts.run(row)

    def decode(self, rows, steps):
        """The rows' next tokens, each fed to the next step."""
        token, position = ([getattr(r, name) for r in rows] for name in ("token", "position"))
        start = torch.tensor([r.slot * LENGTH for r in rows])
        made = [], []
        for step in range(steps):
            self.steps += 1
            now = torch.tensor(position)
            tiles = PlainTiles(torch.arange(len(rows)), torch.ones(len(rows), dtype=torch.long), start, now, 1)
            logits = self.model(
                input_ids=torch.tensor(token)[None], position_ids=now[None], attention_mask=None, use_cache=False,
                memopd_scheme=Pass(self.cache, start + now, spans=(), tiles=tiles),
            ).logits[0]  # fmt: skip
            uniform = torch.tensor([r.uniforms[step] for r in rows])
            drawn, logprob = draw(logits, uniform, torch.tensor([r.temperature for r in rows], dtype=torch.float64))
            token, position = drawn.tolist(), [min(p + 1, LENGTH - 1) for p in position]
            for into, values in zip(made, (token, logprob.tolist()), strict=True):
                into.append(values)
        return made


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, count)
    return [
        Request(rng.integers(3, VOCABULARY, n), i, Sampling(max_tokens=int(rng.integers(1, 40))))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def graphs(monkeypatch):
    """In place of the modules that need Triton."""
    for name, attribute, value in (("kernel", "Tiles", PlainTiles), ("graphs", "Decoder", PlainDecoder)):
        module = ModuleType(f"memopd.engine.local.{name}")
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def engine_of(captures: bool) -> LocalEngine:
    engine = LocalEngine(tiny_model("qwen2", 0).eval(), None, slots=4, max_length=LENGTH)
    engine._passes.captures = captures
    return engine


@pytest.mark.usefixtures("graphs")
def test_from_graphs_it_samples_what_it_samples_one_by_one():
    some, plain, capturing = requests(16), engine_of(False), engine_of(True)
    for a, b in zip(plain.generate(some), capturing.generate(some), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    assert capturing._passes.graphs.passes > 3
    assert capturing._passes.graphs.steps > 30
    assert plain._passes.graphs is None


@pytest.mark.usefixtures("graphs")
def test_after_a_release_it_samples_the_same_to_the_bit():
    """The first pass of all is captured as well: a resumed run begins with an empty cache."""
    engine, some = engine_of(True), requests(6)
    first = engine.generate(some)
    engine.release()
    assert engine._passes.graphs is None
    for a, b in zip(first, engine.generate(some), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("method", ["logits", "decode"])
def test_a_model_that_cannot_be_captured_runs_one_by_one(method, monkeypatch, caplog):
    def refuse(self, *_):
        raise NotCaptured("operation not permitted")

    monkeypatch.setattr(PlainDecoder, method, refuse)
    some, engine = requests(6), engine_of(True)
    with caplog.at_level(logging.WARNING, "memopd"):
        made = engine.generate(some)
    assert [c.tokens.tolist() for c in made] == [c.tokens.tolist() for c in engine_of(False).generate(some)]
    assert not engine._passes.captures
    assert [r.getMessage() for r in caplog.records] == [
        "engine: Qwen2ForCausalLM cannot be captured, steps run one by one (operation not permitted)"
    ]
