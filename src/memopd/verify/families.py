"""Tiny models of every family that is checked, with random weights: real code, real shapes, no download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

hf: Any = transformers  # its configs are typed more narrowly than they are used

VOCABULARY = 131

_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = 12  # shorter than the calls of the checks, so that it cuts
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _longrope(short_of: int) -> dict[str, Any]:
    half = 64 // 4 // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(half)],
        "long_factor": [2.0 + 0.5 * i for i in range(half)],
        "original_max_position_embeddings": short_of,
    }


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_TINY),
    "mistral (sliding window)": lambda: hf.MistralConfig(**_TINY, sliding_window=_WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**_TINY, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**_TINY, head_dim=16),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_TINY, **_MOE, head_dim=16),
    "gemma2 (soft cap, mixed windows)": lambda: hf.Gemma2Config(
        **_TINY, head_dim=16, sliding_window=_WINDOW, query_pre_attn_scalar=16
    ),
    "gemma3 (mixed windows)": lambda: hf.Gemma3TextConfig(
        **_TINY, head_dim=16, sliding_window=_WINDOW, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "phi3": lambda: hf.Phi3Config(**_TINY),
    "phi3 (longrope)": lambda: hf.Phi3Config(
        **_TINY, original_max_position_embeddings=128, rope_parameters=_longrope(128)
    ),
    "olmo2": lambda: hf.Olmo2Config(**_TINY),
    "granite (scaled logits)": lambda: hf.GraniteConfig(
        **_TINY, logits_scaling=8.0, attention_multiplier=0.2, residual_multiplier=0.3, embedding_multiplier=4.0
    ),
    "smollm3 (layers without rope)": lambda: hf.SmolLM3Config(**_TINY, no_rope_layer_interval=3),
    "gpt-oss (sinks, mixed windows)": lambda: hf.GptOssConfig(
        **_TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=_WINDOW
    ),
    "qwen3-next (linear attention)": lambda: hf.Qwen3NextConfig(
        **_TINY,
        **_MOE,
        head_dim=16,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention"] * 2 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "mamba2 (recurrent)": lambda: hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=16,
        num_heads=8,
        head_dim=16,
        n_groups=1,
        chunk_size=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bloom (own attention)": lambda: hf.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
}


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `family` whose weights, norms, sinks and biases included, are random and not small.

    Default initialisation would leave norms at one, sinks at zero and attention nearly uniform: errors would hide.
    """
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")) or ".D" in name:
                continue  # recurrences are stable only near their own initial values
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return model.to(dtype).eval()
