"""One plan per pack, one function for every model: how a pack's visibility reaches the attention layers.

A plan is made once per pack and travels as a keyword of `model(...)`; transformers hands it to the function
registered here under the name "memopd". No mask function is registered with it: a registered one would look for
restarted positions and cut branches off their prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from memopd.attention.cascade import CascadePlan
from memopd.attention.dense import DensePlan
from memopd.attention.flex import FlexPlan
from memopd.attention.support import has_windows, reference_attention, sharing
from memopd.compile import Packed

log = logging.getLogger("memopd")

NAME = "memopd"


class Plan(Protocol):
    """How one pack attends, in every layer."""

    name: str

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


KERNELS = {"dense": DensePlan, "cascade": CascadePlan, "flex": FlexPlan}


def make_plan(packed: Packed, attention: str, model: Any) -> Plan:
    """The plan of `packed` for the kernel called `attention`; "auto" chooses one and says why."""
    parameter = next(model.parameters())
    if attention == "auto":
        config, device = model.config.get_text_config(), parameter.device.type
        attention, why = choose_attention(config, device, parameter.dtype, len(packed))
        say_once(f"attention: {attention} ({why})")
    if attention not in KERNELS:
        raise ValueError(f"unknown attention {attention!r}: choose from auto, {', '.join(KERNELS)}")
    if attention != "cascade":
        return KERNELS[attention](packed, parameter.device)
    plan = CascadePlan(packed, parameter.device, windowed=has_windows(model.config.get_text_config()))
    log.debug("cascade: %s (%s)", plan.layout, plan.why)
    return plan


CPU_CASCADE_FROM = 512  # rows; below it one dense mask is faster on a CPU (`python -m benchmarks attention`)


def choose_attention(config: Any, device: str, dtype: torch.dtype, rows: int) -> tuple[str, str]:
    """(kernel, why) for this model, device, precision and number of rows."""
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "v_head_dim", None) and getattr(config, "qk_head_dim", None) != config.v_head_dim:
        return "dense", "values of another width than keys"
    if device == "cpu":
        if softcap:
            return "dense", "soft caps on a CPU"
        if rows < CPU_CASCADE_FROM:
            return "dense", f"under {CPU_CASCADE_FROM} rows on a CPU"
        return "cascade", f"{CPU_CASCADE_FROM} rows or more on a CPU"
    if device != "cuda":
        return "dense", f"no other kernel on {device}"
    if dtype == torch.float64:
        return "dense", "float64 has no other kernel on a GPU"
    if softcap:
        return "flex", "soft caps"
    if dtype == torch.float32:
        return (
            ("flex", "sliding windows in float32")
            if has_windows(config)
            else ("cascade", "float32, memory-efficient kernel")
        )
    if head_dim % 8 or head_dim > 256:
        return "flex", f"a head dimension of {head_dim}"
    return "cascade", "FlashAttention on trie paths"


_said: set[str] = set()


def say_once(line: str, level: int = logging.INFO) -> None:
    if line not in _said:
        _said.add(line)
        log.log(level, line)


HARMLESS = {"position_ids", "cache_position"}  # what layers also pass on, and positions are in the plan


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
    memopd_plan: Plan | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if memopd_plan is None:
        raise ValueError(
            "the model's attention is set to memopd but no plan came with the call: use memopd.score, or run it as "
            "usual inside `with memopd.attention.own_attention(model):`"
        )
    if attention_mask is not None:
        raise ValueError("memopd attention takes no attention_mask: the plan says what each row sees")
    if unknown := [name for name, value in rest.items() if isinstance(value, Tensor) and name not in HARMLESS]:
        raise ValueError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which memopd does not know"
        )
    if dropout:
        raise ValueError("attention dropout must be 0: calls that share a row would share its mask")
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings leave queries and keys in float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return memopd_plan.attend(query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, attend)


@contextmanager
def planned_attention(model: Any) -> Iterator[None]:
    """Attention goes through plans inside the block.

    With gradient checkpointing, the backward pass runs the layers again and must find the same attention: then
    it stays set. A later call without a plan says so instead of computing something else.
    """
    before = model.config._attn_implementation
    if before == NAME:
        yield
        return
    model.set_attn_implementation(NAME)
    runs_again = False
    try:
        yield
        runs_again = model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False)
    finally:
        if not runs_again:
            model.set_attn_implementation(before)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """The model as transformers runs it, never through us. Models that cannot share keep what they have."""
    before = model.config._attn_implementation
    if not sharing(model).shared:
        yield
        return
    model.set_attn_implementation(reference_attention(model))
    try:
        yield
    finally:
        model.set_attn_implementation(before)
