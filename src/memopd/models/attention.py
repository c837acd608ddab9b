"""The adapter to transformers, through which the layers of a model call our attention.

A *scheme* defines how the rows of one forward pass attend. You pass it as the keyword `memopd_scheme` of `model(...)`;
transformers passes it on, with each layer's queries, keys and values, to the function that this module registers under
the name "memopd". Three blocks set a model's attention:

    planned_attention   for packs: inside the block, the model uses our attention
    sampling_attention  for the local engine: the same, without gradients, and with exclusive use of the model
    own_attention       for references: the model as transformers runs it

Inside the first two, a pass without a scheme raises an error. Outside them, "memopd" is transformers' sdpa: a model
that was loaded with this name, or that keeps it for a backward pass, generates and runs as usual. Which of the two
holds is known per thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import softmax
from transformers import AttentionInterface, AttentionMaskInterface

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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if memopd_scheme is None:
        if _thread.depth:
            raise ValueError(_no_scheme(module))
        if softcap is not None or s_aux is not None:
            return _capped(query, key, value, attention_mask, dropout, Layer(scale, None, softcap, s_aux)), None
        rest |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **rest)
    if attention_mask is not None:
        raise ValueError(
            "memopd attention takes no attention_mask: the plan defines what each row sees "
            "(run the model inside `with memopd.models.attention.planned_attention(model):`)"
        )
    if unknown := [name for name, value in rest.items() if isinstance(value, Tensor) and name not in _HARMLESS]:
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which memopd does not support"
        )
    if dropout:
        raise ValueError("attention dropout must be 0: calls that share a row would share its mask")
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = memopd_scheme.attend(query, key, value, Layer(scale, sliding_window, softcap, s_aux, module))
    if out.shape != (1, query.shape[2], query.shape[1], value.shape[3]):
        expected = [1, query.shape[2], query.shape[1], value.shape[3]]
        raise ValueError(
            f"{type(memopd_scheme).__name__}.attend must return [1, rows, query heads, width], here {expected}; "
            f"got {list(out.shape)}"
        )
    return out, None


def mask(*arguments: Any, **keywords: Any) -> Tensor | None:
    """The function that transformers calls once per pass: no mask where a scheme defines what rows see, else sdpa's.

    transformers looks for restarted positions and would cut branches off their prefix.
    """
    return None if _thread.depth else AttentionMaskInterface()["sdpa"](*arguments, **keywords)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, dropout: float, layer: Layer
) -> Tensor:  # [B, n, Hq, dv]
    """Causal attention with a soft cap or sinks, which transformers' sdpa leaves out."""
    if dropout or (visible is not None and visible.dtype != torch.bool):
        raise ValueError("memopd attention with soft caps or sinks takes no dropout and only boolean masks: use eager")
    n, groups = query.shape[2], query.shape[1] // key.shape[1]
    if visible is None:  # sdpa's meaning: causal, or a single row that sees everything
        visible = torch.ones(n, key.shape[2], dtype=torch.bool, device=query.device)
        visible = visible.tril() if n > 1 else visible
    visible = visible | ~visible.any(-1, keepdim=True)  # a row of padding sees something, so that it is a number
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return plain_attention(query, key, value, visible, layer).transpose(1, 2).contiguous()


# ---- which attention a model uses --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Blocks:
    """The open blocks of one model, on any thread."""

    before: str  # what the model gets back when the last of them ends
    names: list[str] = field(default_factory=list)  # the attention that each of them needs
    sampled: bool = False  # one of them is an engine's


class _Thread(local):  # not a ContextVar, which torch.compile cannot trace
    depth = 0  # how many blocks this thread has open in which a pass needs a scheme


_thread = _Thread()
# By the id of the config, which holds the setting: a critic over a student's backbone has the same one.
_open: dict[int, _Blocks] = {}
_lock = Lock()  # guards `_open` and every change of a model's attention
_IN_USE = "the model is in use by memopd's engine, which has set its attention: run it when no request is open"


def _no_scheme(module: nn.Module) -> str:
    blocks = _open.get(id(getattr(module, "config", None)))
    if blocks is not None and blocks.sampled:
        return _IN_USE
    return (
        "the model's attention is set to memopd but no plan came with the call: use memopd.score, or run it as "
        "usual outside of `planned_attention`"
    )


@contextmanager
def planned_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model's attention goes through schemes.

    With gradient checkpointing, the backward pass runs the layers again and needs the same attention, so it stays set
    after the block. The layers get their scheme again; a later pass without one runs as usual.
    """
    # Asked before the block: inside, an engine may start on another thread, which sets the model to eval mode.
    runs_again = model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False)
    with _block(model, NAME):
        _thread.depth += 1
        try:
            yield
        except BaseException:
            runs_again = False
            raise
        finally:
            _thread.depth -= 1
            if runs_again:
                with _lock:
                    _open[id(model.config)].before = NAME


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model uses transformers' attention. Models that cannot share rows keep their setting."""
    name = reference_attention(model) if sharing(model).shared else model.config._attn_implementation
    with _block(model, name):
        depth = _thread.depth
        _thread.depth -= depth
        try:
            yield
        finally:
            _thread.depth += depth


@contextmanager
def sampling_attention(model: Any) -> Iterator[None]:
    """Inside the block, the model uses our attention, without dropout and gradients; afterwards all is restored."""
    with _block(model, NAME, sampled=True):
        _thread.depth += 1
        try:
            with eval_mode(model), torch.inference_mode():
                yield
        finally:
            _thread.depth -= 1


@contextmanager
def _block(model: Any, name: str, sampled: bool = False) -> Iterator[None]:
    """Set the model's attention. Blocks of several threads may overlap in any order; the last one to end restores.

    As long as one of them needs our attention, it is set: the others run as usual with it.
    """
    with _lock:
        blocks = _open.get(id(model.config)) or _Blocks(model.config._attn_implementation)
        if blocks.sampled and sampled:
            raise ValueError(
                "this model is in use by another engine: wait until its requests are done, or use one engine"
            )
        if blocks.sampled:
            raise ValueError(_IN_USE)
        _open[id(model.config)] = blocks
        blocks.names.append(name)
        blocks.sampled = sampled
        _apply(model, blocks)
    try:
        yield
    finally:
        with _lock:
            blocks.names.remove(name)
            blocks.sampled = blocks.sampled and not sampled
            if not blocks.names:
                del _open[id(model.config)]
            _apply(model, blocks)


def _apply(model: Any, blocks: _Blocks) -> None:
    name = NAME if NAME in blocks.names else [blocks.before, *blocks.names][-1]
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Eval mode inside the block. Restores each module, because a trainer may keep parts of its model in eval mode."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# ---- the definition ----------------------------------------------------------------------------------------------


def plain_attention(
    query: Tensor,  # [..., H, n, d]
    key: Tensor,  # [..., H, m, d], a head per query head
    value: Tensor,  # [..., H, m, dv]
    visible: Tensor,  # [..., n, m] bool
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
