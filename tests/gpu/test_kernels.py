"""The GPU kernels against float64 references. Skipped where there is no GPU."""

import pytest
import torch

from benchmarks.attention import thin_trie, trie_of
from memopd.attention.cascade import CascadePlan
from memopd.attention.dense import DensePlan
from memopd.attention.flex import FlexPlan
from memopd.models.attention import Layer
from memopd.score import Head, Target, divergence_of, vocabulary_scores
from memopd.score.vocabulary import reference_scores
from memopd.verify import equivalence, gradient_equivalence
from memopd.verify.families import FAMILIES, tiny_model
from memopd.verify.models import example_calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
HEADS, KV_HEADS, DIM = 16, 2, 128
PLANS = {
    "levels": lambda packed: CascadePlan(packed, CUDA, "levels", windowed=True),
    "paths": lambda packed: CascadePlan(packed, CUDA, "paths"),
    "flex": lambda packed: FlexPlan(packed, CUDA),
}


def error(actual, expected):
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("packed", [trie_of(3000, 4, 12), thin_trie(3000, 100)], ids=["balanced", "thin"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", PLANS)
def test_attention(kernel, dtype, window, sinks, packed):
    """At most twice the error of the dense mask at the same precision, output and gradients.

    In float32 flex gets twice that again: it adds up the gradients of a key over all heads of its group in one go.
    """
    if window and kernel != "flex" and dtype == torch.float32:
        pytest.skip("refused: no kernel")
    torch.manual_seed(0)
    T = len(packed)
    q, k, v = (torch.randn(1, h, T, DIM, device=CUDA, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS))
    sink = torch.randn(HEADS, device=CUDA, dtype=torch.float64)
    g = torch.randn(1, T, HEADS, DIM, device=CUDA, dtype=torch.float64)

    def run(plan, precision):
        leaves = [x.to(precision).requires_grad_() for x in (q, k, v, sink)[: 4 if sinks else 3]]
        out = plan.attend(*leaves[:3], Layer(DIM**-0.5, window, sinks=leaves[3] if sinks else None))
        return [out.detach(), *torch.autograd.grad(out, leaves, g.to(precision))]

    exact = run(DensePlan(packed, CUDA), torch.float64)
    floor = error(run(DensePlan(packed, CUDA), dtype), exact)
    allowed = 4 if (kernel, dtype) == ("flex", torch.float32) else 2
    assert error(run(PLANS[kernel](packed), dtype), exact) <= allowed * floor


def test_flex_compiles_once_for_packs_of_many_sizes():
    import torch._dynamo.utils

    def run(rows):
        packed = trie_of(rows, 3, 9)
        q, k, v = (torch.randn(1, h, len(packed), 64, device=CUDA, dtype=torch.bfloat16) for h in (4, 2, 2))
        FlexPlan(packed, CUDA).attend(q, k, v, Layer(0.125))

    torch._dynamo.reset()  # else the kernels of other tests would count
    torch._dynamo.utils.counters.clear()
    for rows in (500, 1100):
        run(rows)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before > 0
    for rows in (700, 2000, 3100):
        run(rows)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize(("vocabulary", "theirs"), [(5000, 5000), (5000, 5128), (5128, 5000)])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd:0.3", "top_k:16"])
def test_vocabulary_pass(divergence, dtype, bias, softcap, vocabulary, theirs):
    """At most twice the error of plain PyTorch at the same precision, against float64; chunks and groups crossed."""
    torch.manual_seed(0)
    D, H, H_T = 700, 256, 384
    states, weight = torch.randn(D, H, device=CUDA), torch.randn(vocabulary, H, device=CUDA) * 0.1
    offset = torch.randn(vocabulary, device=CUDA) if bias else None
    their_states, their_weight = torch.randn(D, H_T, device=CUDA), torch.randn(theirs, H_T, device=CUDA) * 0.1
    tokens = torch.randint(min(vocabulary, theirs), (D,), device=CUDA)
    upstream = [torch.randn(D, device=CUDA, dtype=torch.float64) for _ in range(3)]
    rounded = [None if x is None else x.to(dtype) for x in (states, weight, offset, their_states, their_weight)]

    def run(precision, score):
        s, w, b, ts, tw = (None if x is None else x.to(precision) for x in rounded)
        leaves = [x.requires_grad_() for x in (s, w, b) if x is not None]
        outputs = score(Head(w, b, 0.5, softcap), s, Head(tw, None, 1.0, softcap), ts)
        total = sum((o.double() * u).sum() for o, u in zip(outputs, upstream, strict=True))
        return [*(o.detach() for o in outputs), *torch.autograd.grad(total, leaves)]

    def plain(head, s, teacher, ts):
        return reference_scores(head, s, tokens, 0.7, teacher, ts, divergence_of(divergence))

    def fused(head, s, teacher, ts):
        made = vocabulary_scores(head, s, tokens, 0.7, Target(teacher, ts, divergence_of(divergence)), chunk=100)
        return made.logprob, made.entropy, made.divergence

    exact = run(torch.float64, plain)
    assert error(run(dtype, fused), exact) <= 2 * error(run(dtype, plain), exact)


@pytest.mark.parametrize("attention", ["cascade", "flex"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith(("qwen3-next", "mamba2", "bloom"))])
def test_families_in_float32(family, attention):
    model = tiny_model(family).to(CUDA)
    if attention == "cascade" and "window" in family:
        pytest.skip("refused: no float32 kernel for windows")
    assert equivalence(model, example_calls(), attention).passed
    assert gradient_equivalence(model, example_calls(), attention).passed
