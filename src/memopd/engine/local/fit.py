"""Which models the local engine can sample from, and how far."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from memopd.engine.local.attention import Pass, Span, borrowed
from memopd.engine.local.cache import Cache

SERVED_LAYERS = {"full_attention", "sliding_attention", "sparse", "dense"}
DEFAULT_LENGTH = 8192  # tokens a sequence; on a GPU the cache is allocated at this length

CLOSE = 0.1  # of the logits' spread: rounding is far below in every precision, a misread layer far above


def check_model(model: Any) -> None:
    """Refuse what the engine would sample wrongly from, in one line."""
    name, config = type(model).__name__, model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    instead = "the local engine cannot sample from it; serve it with vLLM"
    if getattr(model, "_is_stateful", False) or layers & {"linear_attention", "conv"}:
        raise ValueError(f"{name} has layers that carry state through time: {instead}")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use transformers' attention interface: {instead}")
    if other := layers - SERVED_LAYERS:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(other))}: {instead}")
    kinds = {type(m) for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")}
    windows = "sliding_attention" in layers or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )
    for needed, wanted in (("**kwargs", True), ("sliding_window", windows)):
        if wanted and not all(needed in inspect.getsource(kind.forward) for kind in kinds):
            raise ValueError(f"{name} does not hand {needed} on to its attention: {instead}")
    _compare(model)


def length_limit(model: Any, max_length: int | None) -> int:
    """Tokens a sequence may have, prompt and completion: as asked, as far as the model's positions mean one thing."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or DEFAULT_LENGTH
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [r for r in rope.values() if isinstance(r, dict)] or [rope]:
        if part.get("rope_type") == "longrope":  # past this it turns every position by other angles, the cached too
            limit = min(limit, part.get("original_max_position_embeddings") or limit)
    if max_length is None:
        return min(limit, DEFAULT_LENGTH)
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length must be 2 to {limit}, as far as this model's positions reach; got {max_length}")
    return max_length


def can_capture(model: Any) -> bool:
    """Rope types that look at the longest position make the host wait in every step, which a graph cannot hold."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    parts = [r for r in rope.values() if isinstance(r, dict)] or [rope]
    return not any(part.get("rope_type") in ("dynamic", "longrope") for part in parts)


def _compare(model: Any) -> None:
    """A prompt in three parts through the engine's passes, against the model run by itself: families differ in what
    they do around their attention, and a new one must not be sampled from wrongly in silence."""
    device = next(model.parameters()).device
    ids = torch.arange(24, device=device) * 7 % min(101, model.get_input_embeddings().weight.shape[0])
    before, cache = model.config._attn_implementation, Cache(1, 24)
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    with borrowed(model):
        model.set_attn_implementation("eager" if softcap or not model._supports_sdpa else "sdpa")
        expected = model(input_ids=ids[None], use_cache=False).logits[0, -1].double()
    logits = expected
    with borrowed(model):
        for a, b in ((0, 16), (16, 23), (23, 24)):
            rows, span = torch.arange(a, b, device=device), Span(slot=0, first=0, count=b - a, position=a)
            now = Pass(cache, rows, spans=[span], alone=[span])
            logits = model(
                input_ids=ids[None, a:b],
                position_ids=rows[None],
                attention_mask=None,
                use_cache=False,
                memopd_pass=now,
            ).logits[0, -1]
    off = (logits.double() - expected).square().mean().sqrt() / expected.std()
    if off > CLOSE:  # NaN weights are not this check's business
        raise ValueError(
            f"{type(model).__name__} does more around its attention than the local engine knows of (logits off by "
            f"{off:.0%} of their spread): serve it with vLLM"
        )
    assert model.config._attn_implementation == before
