"""The adapter to transformers, through which the layers of a model call our attention.

A *scheme* defines how the rows of one forward pass attend. You pass it as the keyword `memopd_scheme` of `model(...)`;
transformers passes it on, with each layer's queries, keys and values, to the function that this module registers under
the name "memopd". We register no mask function, so that transformers makes no mask. A registered one would look for
restarted positions and cut branches off their prefix.

    planned_attention   for packs: inside the block, the model uses our attention
    sampling_attention  for the local engine: the same, without gradients, and with exclusive use of the model
    own_attention       for references: the model as transformers runs it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from transformers import AttentionInterface

from memopd.models.support import reference_attention, sharing

NAME = "memopd"


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of a layer's attention, besides queries, keys and values."""

    scale: float
    window: int | None = None  # a row sees only keys that are less than this many positions back
    softcap: float | None = None  # scores become cap · tanh(scores / cap)
    sinks: Tensor | None = None  # [Hq], a score per head that takes part in the softmax but has no value
    module: nn.Module | None = None

    @property
    def index(self) -> int:
        """The number of the layer. We read it from the module: a field here would compile a graph for every layer."""
        number: Any = getattr(self.module, "layer_idx", None)
        assert number is not None
        return int(number)


class Scheme(Protocol):
    """Defines how the rows of one pass attend, in every layer."""

    def attend(
        self,
        query: Tensor,  # [1, Hq, T, d]
        key: Tensor,  # [1, Hkv, T, d]
        value: Tensor,  # [1, Hkv, T, dv]
        layer: Layer,
    ) -> Tensor:  # [1, T, Hq, dv]
        ...


_HARMLESS = {"position_ids", "cache_position"}  # some layers pass these on too; a scheme has its own positions


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    memopd_scheme: Scheme | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer."""
    if memopd_scheme is None:
        raise ValueError(_no_scheme(module))
    if attention_mask is not None:
        raise ValueError("memopd attention takes no attention_mask: the plan defines what each row sees")
    if unknown := [name for name, value in rest.items() if isinstance(value, Tensor) and name not in _HARMLESS]:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which memopd does not support"
        )
    if dropout:
        raise ValueError("attention dropout must be 0: calls that share a row would share its mask")
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = memopd_scheme.attend(query, key, value, Layer(scale, sliding_window, softcap, s_aux, module))
    if out.shape != (1, query.shape[2], query.shape[1], value.shape[3]):
        expected = [1, query.shape[2], query.shape[1], value.shape[3]]
        raise ValueError(
            f"{type(memopd_scheme).__name__}.attend must return [1, rows, query heads, width], here {expected}; "
            f"got {list(out.shape)}"
        )
    return out, None


AttentionInterface.register(NAME, attend)


def _no_scheme(module: nn.Module) -> str:
    if any(module is part for model in list(_sampled) for part in model.modules()):
        return _IN_USE
    return (
        "the model's attention is set to memopd but no plan came with the call: use memopd.score, or run it as "
        "usual inside `with memopd.models.attention.own_attention(model):`"
    )


# ---- which attention a model uses --------------------------------------------------------------------------------

# The models that an engine is running, each with the attention that it gets back when the engine is done. A block of
# another thread may end while the engine runs. It then leaves its model's earlier attention here.
_sampled: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_lock = Lock()  # guards `_sampled` and every change of a model's attention
_IN_USE = "the model is in use by memopd's engine, which has set its attention: run it when no request is open"


@contextmanager
def planned_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model's attention goes through schemes.

    With gradient checkpointing, the backward pass runs the layers again and needs the same attention, so it stays set
    after the block. A later call without a plan then raises an error, and never computes something else.
    """
    before = _set(model, NAME)
    if before == NAME:
        yield
        return
    runs_again = False
    try:
        yield
        runs_again = model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False)
    finally:
        if not runs_again:
            _restore(model, before)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model uses transformers' attention. Models that cannot share rows keep their setting."""
    if not sharing(model).shared:
        _check_free(model)
        yield
        return
    before = _set(model, reference_attention(model))
    try:
        yield
    finally:
        _restore(model, before)


@contextmanager
def sampling_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model uses our attention, without dropout and gradients; afterwards all is restored."""
    with _lock:
        if model in _sampled:
            raise ValueError(
                "this model is in use by another engine: wait until its requests are done, or use one engine"
            )
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        _sampled[model] = before
    try:
        with eval_mode(model), torch.inference_mode():
            yield
    finally:
        with _lock:
            model.set_attn_implementation(_sampled.pop(model))


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Eval mode inside the block. Restores each module, because a trainer may keep parts of its model in eval mode."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _set(model: Any, name: str) -> str:
    """Set the model's attention, unless an engine is running the model. Returns what it was before."""
    with _lock:
        _check_free(model)
        before: str = model.config._attn_implementation
        model.set_attn_implementation(name)
        return before


def _restore(model: Any, name: str) -> None:
    with _lock:
        if model in _sampled:
            _sampled[model] = name
        else:
            model.set_attn_implementation(name)


def _check_free(model: Any) -> None:
    if model in _sampled:
        raise ValueError(_IN_USE)


# ---- the definition ----------------------------------------------------------------------------------------------


def plain_attention(
    query: Tensor,  # [..., H, n, d]
    key: Tensor,  # [..., H, m, d], a head per query head
    value: Tensor,  # [..., H, m, dv]
    visible: Tensor,  # [n, m] bool
    layer: Layer,
) -> Tensor:  # [..., H, n, dv]
    """Attention by matrix products and a softmax: slow, and correct for every kind of layer.

    `visible` must already take the layer's window into account.
    """
    scores = query @ key.transpose(-2, -1) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = softmax(scores, -1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    if layer.sinks is not None:
        weights = weights[..., :-1]  # the sink has no value
    return weights @ value
