"""From logits to a token: the sampling distribution, and the random number that selects the token.

Every request draws from its own counter-based generator: draw i of seed s is always the same number, whatever other
requests run. The number selects a token by the cumulative distribution, so that two runs whose logits differ by
rounding choose different tokens only if the number is within rounding of a boundary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memopd.types import Floats

_BELOW_ONE = 1 - 2**-50  # so that no product with a total rounds up to that total
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
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled - scaled.amax(-1, keepdim=True)
    scaled /= temperature.clamp(min=_COLDEST).to(scaled.dtype)[:, None]
    if top_k is not None and top_p is not None:
        scaled = _cut(scaled, top_k, top_p)
    cumulative = scaled.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the draw. A token of probability 0 is never the first.
    token = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    token = token.clamp(max=logits.shape[-1] - 1)  # for NaN logits: their log p is NaN, which the caller checks
    return token[:, 0], (scaled.gather(-1, token) - total.log())[:, 0]


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The k likeliest tokens, and of these the fewest that reach probability p. Of equal tokens the lower id wins."""
    ordered, token = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    p = ordered.double().softmax(-1)
    reached = p.cumsum(-1) - p  # the probability of all likelier tokens
    ordered = ordered.masked_fill((reached >= top_p[:, None]) & (top_p[:, None] < 1), -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, token, ordered)
