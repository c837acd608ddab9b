"""Hidden states of packed rows: runs the backbone once and reads the rows that predict sampled tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.attention import log_once, make_plan
from memopd.compile import Packed
from memopd.models.attention import planned_attention
from memopd.models.compiled import scheme_for
from memopd.models.device import to_device
from memopd.models.load import backbone
from memopd.models.support import Sharing, check_dropout, check_length, sharing


class _Thread(local):
    def __init__(self) -> None:
        self.ready: dict[int, Sharing] = {}  # by the id of a model inside `many_passes`


_thread = _Thread()


@contextmanager
def many_passes(model: Any) -> Iterator[Sharing]:
    """Inside the block, what holds for all passes of a model is checked and set once: dropout, sharing, attention.

    A model with several adapters has thousands of modules. To go through them for every pass takes a GPU's host longer
    than to start a small model's layers. The block gives whether calls share rows; it may be entered again.
    """
    if (known := _thread.ready.get(id(model))) is not None:
        yield known
        return
    check_dropout(model)
    share = sharing(model)
    with planned_attention(model) if share.shared else nullcontext():
        _thread.ready[id(model)] = share
        try:
            yield share
        finally:
            del _thread.ready[id(model)]


def decision_states(model: Any, packed: Packed, attention: str = "auto") -> Tensor:
    """[D, H]: the last hidden state at g(t, k) for every sampled token, in the order of `packed.decisions`."""
    check_length(model, int(packed.positions.max()) + 1)
    check_ids(model, packed.tokens, packed.decisions.token)
    device = next(model.parameters()).device
    with many_passes(model) as share:
        if not share.shared:
            log_once(f"{share.reason}: its calls run one by one, exact but unshared", logging.WARNING)
            return _unshared_states(model, packed)
        plan = make_plan(packed, attention, model)
        states = backbone(model)(
            input_ids=_row(packed.tokens, device),
            position_ids=_row(packed.positions, device),
            attention_mask=None,
            use_cache=False,
            memopd_scheme=scheme_for(model, plan),
        ).last_hidden_state[0]
    return states[to_device(packed.decisions.row, device, torch.long)]


def call_states(model: Any, tokens: np.ndarray[Any, Any], first: int) -> Tensor:
    """The states of one call alone, unpadded, with the model's own attention, from row `first` on."""
    check_ids(model, tokens)
    device = next(model.parameters()).device
    ids = _row(tokens, device)
    return backbone(model)(input_ids=ids, use_cache=False).last_hidden_state[0, first:]


def check_ids(model: Any, *ids: np.ndarray[Any, Any]) -> None:
    """Refuse ids outside the vocabulary, before a GPU reads past its table. Scoring a store with the wrong model is an
    easy mistake."""
    vocabulary, top = model.get_input_embeddings().weight.shape[0], max(int(i.max()) for i in ids)
    if top >= vocabulary:
        raise ValueError(
            f"token id {top} is outside this model's vocabulary of {vocabulary}: did another model sample these calls?"
        )


def _unshared_states(model: Any, packed: Packed) -> Tensor:
    """Runs every call of the pack by itself. Decisions are in the order of the calls, and so are the results."""
    decisions = packed.decisions
    first = np.flatnonzero(np.diff(decisions.call, prepend=-1))
    last = np.append(first[1:], len(decisions)) - 1
    states = []
    for a, b in zip(first, last, strict=True):
        path = packed.path(int(decisions.row[b]))
        states.append(call_states(model, packed.tokens[path], len(path) - (b - a + 1)))
    return torch.cat(states)


def _row(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return to_device(values, device, torch.long)[None]
