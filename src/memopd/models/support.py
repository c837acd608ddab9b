"""Decides which models can use our attention, which must run call by call, and how long a call may be.

We require two things of a model. Every layer mixes rows only through transformers' attention interface. And the state
of a row depends only on its ids and positions, not on the longest call in the pass. Packs need both to share rows; the
local engine needs both to cache keys and values.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
DEFAULT_LENGTH = 8192  # tokens per sequence; on a GPU the engine allocates its cache for this length


@dataclass(frozen=True, slots=True)
class Sharing:
    shared: bool
    reason: str  # why it is not shared; empty if it is


def sharing(model: Any) -> Sharing:
    """Whether the calls of this model may share rows. Unshared calls run one by one, which is slower and as exact."""
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or layers & {"linear_attention", "conv"}:
        return Sharing(False, f"{name} has layers that carry state through time")
    if not getattr(model, "_supports_attention_backend", False):
        return Sharing(False, f"{name} does not use transformers' attention interface")
    if other := layers - SUPPORTED_LAYERS:
        return Sharing(False, f"{name} has layers of type {', '.join(sorted(other))}")
    sources = _attention_sources(model)
    if not sources:  # without this line, the next two checks would pass on an empty list
        return Sharing(False, f"{name} has no attention layers that memopd recognises")
    if not all("**kwargs" in source for source in sources):
        return Sharing(False, f"{name} does not pass keywords on to its attention")
    if has_windows(config) and not all("sliding_window" in source for source in sources):
        return Sharing(False, f"{name} applies its sliding window only through the mask")
    return Sharing(True, "")


def has_windows(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def _attention_sources(model: Any) -> list[str]:
    """The source code of the attention layers, which alone shows what they pass on."""
    kinds = {type(m) for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")}
    return [_forward_source(kind) for kind in kinds]


_sources: dict[type[Any], str] = {}


def _forward_source(kind: type[Any]) -> str:
    if kind not in _sources:
        try:
            _sources[kind] = inspect.getsource(kind.forward)
        except OSError:
            _sources[kind] = ""  # without the source, we cannot know that anything is passed on
    return _sources[kind]


def reference_attention(model: Any) -> str:
    """The transformers attention that computes the model exactly: sdpa, unless that would leave something out.

    transformers' sdpa ignores soft caps (Gemma 2) and does not support sinks (gpt-oss).
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_sdpa", False):
        return "eager"
    return "sdpa"


def check_dropout(model: Any) -> None:
    if model.training and any(
        (isinstance(m, torch.nn.Dropout) and m.p > 0) or getattr(m, "attention_dropout", 0) for m in model.modules()
    ):
        raise ValueError(
            "dropout must be 0 (calls that share a row would share its mask): set it to 0, or model.eval()"
        )


# ---- up to which length positions have one meaning ---------------------------------------------------------------


def rope_switch(model: Any) -> tuple[str, int] | None:
    """(rope type, length) at which the rope of this model changes its frequencies; None if it never does.

    `dynamic` and `longrope` choose their frequencies by the longest position of a pass. Beyond this length, a token's
    state depends on the pass that computed it: sampler, packed and independent calls have three different states.
    """
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    switches = []
    for rope in [part for part in ropes.values() if isinstance(part, dict)] or [ropes]:  # per layer type, or one
        kind = rope.get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            switches.append((kind, original or config.max_position_embeddings))
    return min(switches, key=lambda switch: switch[1], default=None)


def check_length(model: Any, longest: int) -> None:
    """Refuse calls that are longer than the length at which a rope type changes its frequencies."""
    if (switch := rope_switch(model)) is not None and longest > switch[1]:
        kind, limit = switch
        raise ValueError(
            f"a call of {longest} tokens passes the length of {limit} at which this model's {kind} rope changes "
            "its frequencies: its sampled states cannot be rebuilt; keep calls shorter or use another rope type"
        )


def position_limit(model: Any) -> int:
    """How far a model's positions reach. Only its configuration is read."""
    limit: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_LENGTH
    switch = rope_switch(model)
    return limit if switch is None else min(limit, switch[1])


def length_limit(model: Any, max_length: int | None) -> int:
    """The most tokens of a sequence, prompt and completion: `max_length`, if the model's positions reach that far."""
    limit = position_limit(model)
    if max_length is None:
        return min(limit, DEFAULT_LENGTH)
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length must be 2 to {limit}, as far as this model's positions reach; got {max_length}")
    return max_length
