"""Which models can share rows, which run unshared, and what is refused.

Sharing needs two things of a model: every layer mixes rows through transformers' attention interface and nowhere
else, and what a row computes depends on its ids and positions alone, not on the longest call beside it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

SHAREABLE_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}


@dataclass(frozen=True, slots=True)
class Sharing:
    shared: bool
    reason: str  # why not; empty when shared


def sharing(model: Any) -> Sharing:
    """Whether this model's calls may share rows. Unshared calls run one by one: slower, and as exact."""
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or "linear_attention" in layers or "conv" in layers:
        return Sharing(False, f"{name} has layers that carry state through time")
    if not getattr(model, "_supports_attention_backend", False):
        return Sharing(False, f"{name} does not use transformers' attention interface")
    if other := layers - SHAREABLE_LAYERS:
        return Sharing(False, f"{name} has layers of type {', '.join(sorted(other))}")
    sources = _attention_sources(model)
    if not all("**kwargs" in source for source in sources):
        return Sharing(False, f"{name} does not hand keywords on to its attention")
    if has_windows(config) and not all("sliding_window" in source for source in sources):
        return Sharing(False, f"{name} keeps its sliding window in the mask alone")
    return Sharing(True, "")


def has_windows(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def _attention_sources(model: Any) -> list[str]:
    """What the attention layers' own code says: the only place where it can be seen what they pass on."""
    kinds = {type(m) for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")}
    return [_forward_source(kind) for kind in kinds]


_read: dict[type[Any], str] = {}


def _forward_source(kind: type[Any]) -> str:
    if kind not in _read:
        try:
            _read[kind] = inspect.getsource(kind.forward)
        except OSError:
            _read[kind] = ""  # cannot be read, so nothing is known to be passed on
    return _read[kind]


def reference_attention(model: Any) -> str:
    """The transformers attention that computes what the model means: sdpa, unless it would drop a part.

    transformers' sdpa ignores soft caps (Gemma 2) and knows no sinks (gpt-oss).
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) or not getattr(model, "_supports_sdpa", False):
        return "eager"
    return "sdpa"


def check_length(model: Any, longest: int) -> None:
    """Refuse calls past the length at which a rope type changes its frequencies.

    `dynamic` and `longrope` choose them from the longest position in the batch, so that a token's state depends on
    when it was computed: the sampler's, the packed and the independent one are three different things.
    """
    config = model.config.get_text_config()
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or limit
        if longest > limit:
            raise ValueError(
                f"a call of {longest} tokens passes the length of {limit} at which this model's {kind} rope changes "
                "its frequencies: its sampled states cannot be rebuilt; keep calls shorter or use another rope type"
            )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One set of parameters, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
