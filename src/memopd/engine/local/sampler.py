"""From logits to a token: the sampling distribution, and the random number that selects the token.

Every request draws from its own counter-based generator: draw i of seed s is always the same number, whatever other
requests run. The number selects a token by the cumulative distribution, so that two runs whose logits differ by
rounding choose different tokens only if the number is within rounding of a boundary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from memopd.types import Floats

_BELOW_ONE = 1 - 2**-50  # so that no product with a total rounds up to that total
BLOCK = 128  # tokens whose weights are summed first
_COLDEST = 1e-30  # in float32 a lower temperature would be 0; long before that, the likeliest token is certain


class Uniforms:
    """Draw i of a seed, for i = 0, 1, 2, ...: Philox with the seed as its key and i as its counter.

    >>> bool((Uniforms(7).until(3) == Uniforms(7).until(5)[:3]).all())
    True
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed % 2**128))
        self._drawn = np.empty(0)

    def until(self, count: int) -> Floats:
        """At least the first `count` draws."""
        if count > len(self._drawn):
            more = self._generator.random(max(64, count - len(self._drawn)))
            self._drawn = np.concatenate([self._drawn, np.minimum(more, _BELOW_ONE)])
        return self._drawn


def draw(
    logits: Tensor,  # [B, V]
    uniform: Tensor,  # [B] float64, in [0, 1)
    temperature: Tensor,  # [B] float64
    top_k: Tensor | None = None,  # [B], the width of the vocabulary where off
    top_p: Tensor | None = None,  # [B] float64, 1 where off
) -> tuple[Tensor, Tensor]:
    """(token, log p), sampled from the softmax of logits / temperature, restricted to top_k and top_p if given.

    Logits are in float32, or in float64 for a float64 model; the cumulative distribution is in float64.
    """
    scaled = _scaled(logits, temperature, top_k, top_p)
    token, total = _first_above(scaled.exp(), uniform[:, None])
    return token[:, 0], (scaled.gather(-1, token) - total.log())[:, 0]


def likeliest(
    logits: Tensor, count: int, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of every row with their log p, under the distribution that `draw` samples from.

    Tokens of probability 0 are left out.
    """
    found = _scaled(logits, temperature, top_k, top_p).double().log_softmax(-1).topk(min(count, logits.shape[-1]))
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[(i, p) for i, p in zip(*row, strict=True) if p > -torch.inf] for row in rows]


def _scaled(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The logarithm of every token's weight in the sampling distribution."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled - scaled.amax(-1, keepdim=True)
    scaled /= temperature.clamp(min=_COLDEST).to(scaled.dtype)[:, None]
    return scaled if top_k is None or top_p is None else _cut(scaled, top_k, top_p)


def _first_above(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative share exceeds the draw, and the total weight: both [B, 1].

    It finds the block of tokens first and then the token in it, because a running sum in float64 over a large
    vocabulary takes longer than the rest of the draw. A token of weight 0 is never the first.
    """
    width = weights.shape[-1]
    if rest := -width % BLOCK:
        weights = pad(weights, (0, rest))
    blocks = weights.unflatten(-1, (-1, BLOCK))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1:]
    target = uniform * total
    block = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[-1] - 1)  # NaN weights would be past it
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    # Rounding may put the draw at the end of the block's own sum; its last token of positive weight is meant then.
    target = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    token = block * BLOCK + torch.searchsorted(inside, target, right=True)
    return token.clamp(max=width - 1), total  # for NaN weights: their log p is NaN, which the caller checks


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The k likeliest tokens, and of these the fewest that reach probability p. Of equal tokens the lower id wins."""
    ordered, token = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    p = ordered.double().softmax(-1)
    reached = p.cumsum(-1) - p  # the probability of all likelier tokens
    ordered = ordered.masked_fill((reached >= top_p[:, None]) & (top_p[:, None] < 1), -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, token, ordered)
