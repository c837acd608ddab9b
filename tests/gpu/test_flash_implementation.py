"""FlashAttention 3 and 4 reach our kernels through PyTorch's registry: our calls go through what is activated there."""

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from benchmarks.attention import trie_of
from memopd.attention import varlen
from memopd.attention.cascade import nodes_of, path_pass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
calls = {"forward": 0, "backward": 0}


def softmax_of(q, k, scale, causal):
    """[H, n, m] weights and log-sum-exps of one segment, aligned at the end."""
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float().repeat_interleave(groups, 1)) * scale
    if causal:
        n, m = scores.shape[1:]
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def bounds(cu_q, cu_k):
    q, k = cu_q.tolist(), cu_k.tolist()
    return zip(q[:-1], q[1:], k[:-1], k[1:], strict=True)


def plain_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, scale=None, **_):
    calls["forward"] += 1
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for a, b, c, d in bounds(cu_q, cu_k):
        weights, lse[:, a:b] = softmax_of(q[a:b], k[c:d], scale, causal)
        values = v[c:d].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[a:b] = torch.einsum("hnm,mhd->nhd", weights, values).to(out.dtype)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, lse, unused, unused[0], q.new_empty(0)


def plain_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, scale=None, **_):
    calls["backward"] += 1
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    for a, b, c, d in bounds(cu_q, cu_k):
        weights, _ = softmax_of(q[a:b], k[c:d], scale, causal)
        do, keys, values = grad[a:b].float(), *(x[c:d].float().repeat_interleave(groups, 1) for x in (k, v))
        dp = torch.einsum("nhd,mhd->hnm", do, values)
        ds = weights * (dp - (do * out[a:b].float()).sum(-1).T[:, :, None]) * scale
        dq[a:b] = torch.einsum("hnm,mhd->nhd", ds, keys).to(q.dtype)
        for into, of, x in ((dk, ds, q[a:b].float()), (dv, weights, do)):
            each = torch.einsum("hnm,nhd->mhd", of, x)
            into[c:d] = each.unflatten(1, (-1, groups)).sum(2).to(into.dtype)
    return dq, dk, dv


def register():
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("_flash_attention_forward", plain_forward, "CUDA")
    library.impl("_flash_attention_backward", plain_backward, "CUDA")

    class Handle:
        def remove(self):
            library._destroy()

    return Handle()


def run():
    """Forward and backward of one pass over the paths of a trie."""
    torch.manual_seed(0)
    packed = trie_of(600, 3, 9)
    (paths,) = path_pass(nodes_of(packed.exit), CUDA)
    q, k, v = (torch.randn(len(packed), h, 64, device=CUDA, dtype=torch.bfloat16) for h in (4, 2, 2))
    k, v = paths.keys.take(k), paths.keys.take(v)
    out, lse = varlen.forward(q, k, v, paths.segments, 0.125, None)
    grads = varlen.backward(torch.randn_like(out), q, k, v, out, lse, paths.segments, 0.125, None)
    return [out, lse, *grads]


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_our_calls_go_through_the_activated_implementation():
    before = run()
    assert calls == {"forward": 0, "backward": 0}
    register_flash_attention_impl("plain", register_fn=register)
    activate_flash_attention_impl("plain")
    try:
        activated = run()
    finally:
        restore_flash_attention_impl()
    assert calls == {"forward": 1, "backward": 1}
    for ours, plain in zip(before, activated, strict=True):
        assert float((ours.float() - plain.float()).norm() / plain.float().norm()) < 0.01  # bfloat16 keeps three digits
    restored = run()
    assert calls == {"forward": 1, "backward": 1}
    assert all(torch.equal(a, b) for a, b in zip(before, restored, strict=True))
