"""The local engine on a GPU: its kernel, its captured steps, its precision. Skipped where there is no GPU."""

import numpy as np
import pytest
import torch

from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.local import passes as passes_module
from memopd.engine.local.attention import Span, plain
from memopd.models.attention import Layer
from memopd.models.support import length_limit
from memopd.score import head_of
from memopd.types import Call, Sampling
from memopd.verify.equivalence import MORE_PRECISE, alone_states, at_precision, sampled_tokens
from memopd.verify.families import FAMILIES, VOCABULARY, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")


def requests(count, seed=0, **sampling):
    rng = np.random.default_rng(seed)
    start = rng.integers(3, VOCABULARY, 40)
    return [
        Request(
            np.concatenate([start[: 40 * (i % 2)], rng.integers(3, VOCABULARY, rng.integers(1, 100))]),
            i,
            Sampling(**sampling, max_tokens=int(rng.integers(1, 40))),
        )
        for i in range(count)
    ]


@torch.no_grad()
def alone(model, calls):
    logits = head_of(model).logits(alone_states(model, calls)).double()
    return logits.log_softmax(-1).gather(1, sampled_tokens(calls, logits.device)[:, None])[:, 0].cpu()


def gap(model, some, slots=64, length=256):
    """(recorded, tolerance): against the calls alone at a higher precision; twice what the calls alone are off by."""
    made = LocalEngine(model, None, slots=slots, max_length=length).generate(some)
    calls = [Call(r.prompt, c.tokens, c.logprobs) for r, c in zip(some, made, strict=True)]
    exact = alone(at_precision(model, MORE_PRECISE[model.dtype]), calls)
    recorded = torch.as_tensor(np.concatenate([c.logprobs for c in calls]))
    own = (alone(model, calls) - exact).abs()
    return float((recorded - exact).abs().max()), 2 * float(own.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv", "d"), [(6, 2, 32), (28, 4, 128), (4, 4, 80)])
def test_kernel(heads, kv, d, dtype):
    """At most twice the error of plain products at the same precision, against float64.

    Or what a running sum over the keys rounds by: the kernel adds blocks one after the other, a plain product pairwise.
    """
    from memopd.engine.local.kernel import tiles_of

    torch.manual_seed(0)
    keys, values = (torch.randn(5, 300, kv, d, device=CUDA).to(dtype) for _ in range(2))
    spans, at = [], 0
    for slot, count, position in ((2, 1, 0), (0, 70, 13), (4, 300, 0), (1, 1, 299), (3, 64, 64)):
        spans.append(Span(slot, at, count, position))
        at += count
    query = torch.randn(heads, at, d, device=CUDA).to(dtype).transpose(0, 1)
    for some in (spans, [Span(s.slot, i, 1, s.position) for i, s in enumerate(spans)]):
        out = tiles_of(some, heads // kv, 300, CUDA).attend(query, keys, values, d**-0.5)
        for s in some:
            rows, past = slice(s.first, s.first + s.count), (keys[s.slot, : s.length], values[s.slot, : s.length])
            rest = (s.position, Layer(d**-0.5))
            exact = plain(query[rows].double(), *(x.double() for x in past), *rest)
            floor = (plain(query[rows], *past, *rest).double() - exact).norm()
            running = torch.finfo(torch.float32).eps * s.length**0.5 * exact.norm()
            assert (out[rows].double() - exact).norm() <= 2 * floor + running


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_recorded_log_probabilities_in_float32(family):
    recorded, tolerance = gap(tiny_model(family).to(CUDA), requests(150))
    assert recorded <= tolerance


def test_recorded_log_probabilities_in_bfloat16():
    recorded, tolerance = gap(tiny_model("qwen2").to(CUDA, torch.bfloat16), requests(150))
    assert recorded <= tolerance


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.startswith(("mistral", "gemma2", "gpt-oss", "phi3 (long"))]
)
def test_layers_that_only_plain_products_serve(family):
    model = tiny_model(family).to(CUDA)
    length = length_limit(model, None)  # longrope turns its positions otherwise further on
    fitting = [r for r in requests(20) if len(r.prompt) < length]
    recorded, tolerance = gap(model, fitting, slots=8, length=min(256, length))
    assert recorded <= tolerance


def test_captured_steps_sample_what_single_steps_do(monkeypatch):
    model = tiny_model("qwen2").to(CUDA)
    some = [*requests(40), *requests(40, seed=1, temperature=0.7, top_p=0.9, top_k=20)]
    captured = LocalEngine(model, None, slots=12, max_length=256)
    made = captured.generate(some)
    assert captured._passes.graphs.graphs
    assert captured._passes.graphs.prompts.graphs
    monkeypatch.setattr(passes_module.Passes, "can_capture", lambda self: False)
    expected = LocalEngine(model, None, slots=12, max_length=256).generate(some)
    same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(made, expected, strict=True))
    assert same >= 79  # one draw within rounding of a boundary is allowed for
    assert [c.stop for c in made][:10] == [c.stop for c in expected][:10]


def test_weights_trained_in_place_need_no_new_capture():
    model = tiny_model("qwen2").to(CUDA)
    engine, some = LocalEngine(model, None, slots=16, max_length=256), requests(30)
    engine.generate(some)
    graphs = dict(engine._passes.graphs.graphs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05)
    engine.version = 1
    made = engine.generate(some)
    assert graphs.items() <= engine._passes.graphs.graphs.items()
    expected = LocalEngine(model, None, slots=16, max_length=256).generate(some)
    same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(made, expected, strict=True))
    assert same >= 29


def test_a_released_cache_gives_its_memory_back_and_changes_no_result():
    """Cache and captured steps; the same completions to the bit when they are made again."""
    model = tiny_model("qwen2").to(CUDA, torch.bfloat16)
    engine, some = LocalEngine(model, None, slots=64, max_length=512), requests(24)
    first = engine.generate(some)
    allocated, cache = torch.cuda.memory_allocated(), engine.cache_bytes
    assert cache > 10 << 20
    engine.release()
    assert engine.cache_bytes == 0
    assert torch.cuda.memory_allocated() <= allocated - cache
    for a, b in zip(first, engine.generate(some), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
    engine.close()


def test_training_releases_a_large_cache_only(monkeypatch):
    from types import SimpleNamespace

    from memopd.train import engines

    model = tiny_model("qwen2").to(CUDA, torch.bfloat16)
    policy = engines.LocalPolicy.__new__(engines.LocalPolicy)
    policy.root, policy.version, policy.model = SimpleNamespace(model=model), 0, model
    policy.engine = LocalEngine(model, None, slots=4, max_length=256)
    policy.engine.generate(requests(4))
    policy.release()
    assert policy.engine.cache_bytes > 0  # less than a tenth of any GPU
    monkeypatch.setattr(engines, "KEPT", 0.0)
    policy.release()
    assert policy.engine.cache_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_sample_as_exactly_as_the_layers_by_themselves(dtype):
    model = tiny_model("qwen2", dtype=dtype).cuda().eval()
    some = requests(40, temperature=1.0)
    plain, fused = (LocalEngine(model, None, slots=16, max_length=256, fused=f).generate(some) for f in (False, True))
    same = sum(np.array_equal(a.tokens, b.tokens) for a, b in zip(plain, fused, strict=True))
    assert same >= (40 if dtype == torch.float32 else 30)  # half precision: draws within rounding of a boundary
    calls = [Call(r.prompt, c.tokens, c.logprobs) for r, c in zip(some, fused, strict=True)]
    exact = alone(at_precision(model, MORE_PRECISE[dtype]), calls)
    recorded = torch.as_tensor(np.concatenate([c.logprobs for c in calls]))
    assert float((recorded - exact).abs().max()) <= 2 * float((alone(model, calls) - exact).abs().max())
