"""Packed scoring for trainers that keep a batch as padded rows with masks.

input_ids        0  0  5  6 |  7  8        logits_to_keep = 2: the last two columns hold sampled tokens
                 4  5  5  6 |  9  0
attention_mask   0  0  1  1 |  1  1        the prompt is padded on the left, the completion on the right
                 1  1  1  1 |  1  0
result                         x  x        one number per column that was kept; 0 where there is no token
                               x  0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memopd.score.head import head_of
from memopd.score.score import packed_logprobs
from memopd.types import Call

Bools = NDArray[np.bool_]


def packed_rows(
    model: Any,
    input_ids: Tensor,  # [B, T]
    attention_mask: Tensor,  # [B, T]
    logits_to_keep: int,  # K
    completion_mask: Tensor | None = None,  # [B, K]
    attention: str = "auto",
    temperature: float = 1.0,
    budget: int | None = None,
) -> tuple[Tensor, Tensor]:  # [B, K], [B, K]
    """log p and entropy of every token in the last K columns, differentiable: for a trainer with padded batches.

    The result equals running every row alone without its padding, but each shared prefix is computed once. It is 0 in
    columns without a token, and where `completion_mask` is 0: tokens that the model read and did not sample.
    """
    ids, mask = _checked(input_ids, attention_mask, logits_to_keep)
    wanted = mask[:, -logits_to_keep:]
    if completion_mask is not None:
        if completion_mask.shape != wanted.shape:
            shapes = f"{list(wanted.shape)}, as logits_to_keep says; got {list(completion_mask.shape)}"
            raise ValueError(f"completion_mask must have the shape {shapes}")
        wanted = wanted & _bools(completion_mask, "completion_mask")
    calls, spans = _calls(ids, mask, wanted)
    if calls:
        logprobs, entropies = packed_logprobs(model, calls, attention, temperature, budget, entropies=True)
    else:  # a zero that still has a gradient: trainers call backward() on a batch in which every token is masked, too
        weight = head_of(model).weight
        logprobs = entropies = [weight.to(torch.promote_types(weight.dtype, torch.float32))[0, :0]]
    return _scatter(logprobs, spans, wanted), _scatter(entropies, spans, wanted)


def _checked(input_ids: Tensor, attention_mask: Tensor, kept: int) -> tuple[NDArray[Any], Bools]:
    if input_ids.ndim != 2 or attention_mask.shape != input_ids.shape:
        raise ValueError(
            "input_ids and attention_mask must both be [rows, columns], "
            f"got {list(input_ids.shape)} and {list(attention_mask.shape)}"
        )
    if not 1 <= kept < input_ids.shape[1]:
        columns = input_ids.shape[1]
        raise ValueError(
            f"logits_to_keep must be 1 to {columns - 1}, since nothing predicts the first of {columns} columns; "
            f"got {kept}"
        )
    mask = _bools(attention_mask, "attention_mask")
    pieces = (np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1).sum(1)
    if (empty := np.flatnonzero(pieces == 0)).size:
        raise ValueError(f"attention_mask: row {empty[0]} is all padding: leave it out of the batch")
    if (broken := np.flatnonzero(pieces > 1)).size:
        raise ValueError(
            f"attention_mask: row {broken[0]} has padding between its tokens: pad on the left and on the right only"
        )
    return input_ids.detach().cpu().numpy(), mask


def _bools(mask: Tensor, name: str) -> Bools:
    values = mask.detach().cpu()
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(f"{name} must hold only 0 and 1")
    return (values == 1).numpy()


def _calls(ids: NDArray[Any], mask: Bools, wanted: Bools) -> tuple[list[Call], Bools]:
    """A call per row with a wanted token, and the place of its completion: from its first wanted token to the last."""
    calls, spans, offset = [], np.zeros_like(wanted), ids.shape[1] - wanted.shape[1]
    for i in np.flatnonzero(wanted.any(1)):
        columns = np.flatnonzero(wanted[i])
        first, last, start = columns[0], columns[-1] + 1, int(mask[i].argmax())
        if start == offset + first:
            raise ValueError(
                f"row {i} has no token before the first one to score: lower logits_to_keep, or pass a completion_mask "
                "that is 0 there"
            )
        calls.append(Call(ids[i, start : offset + first], ids[i, offset + first : offset + last], name=f"row {i}"))
        spans[i, first:last] = True
    return calls, spans


def _scatter(values: Sequence[Tensor], spans: Bools, wanted: Bools) -> Tensor:
    flat = torch.cat(list(values))
    inside, keep = (torch.as_tensor(m, device=flat.device) for m in (spans, wanted))
    return flat.new_zeros(inside.shape).masked_scatter(inside, flat).masked_fill(~keep, 0)
