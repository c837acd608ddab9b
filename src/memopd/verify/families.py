"""Tiny models of every family that we check, with random weights: real code and real shapes without a download.

`demo` also samples episodes from one of them, so that you can run an audit on a bare clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from memopd.types import Call, Episode, Sampling, Segment, StopReason

hf: Any = transformers  # the types of its configs are narrower than their use

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
_WINDOW = 12  # shorter than the calls of the checks, so that it has an effect
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
    """A model of `family` whose weights, including norms, sinks and biases, are random and not small.

    Default initialisation has norms of one, sinks of zero and nearly uniform attention, which would hide errors.
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
        model.set_experts_implementation("eager")  # the grouped kernels do not support float64
    return model.to(dtype).eval()


# ---- episodes for the demo ----------------------------------------------------------------------------------------


def demo(episodes: int = 16, calls: int = 5, seed: int = 0) -> tuple[Any, list[Episode]]:
    """A model and MEM1-like episodes that it sampled: |q| 40, responses of 24, observations of 30 ids.

    The texts have no meaning, but the calls are real: sampled token by token, with recorded log-probabilities and
    segments.
    """
    model = tiny_model("qwen2", seed)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    prefix = rng.integers(3, VOCABULARY, (episodes, 40))
    recorded: list[list[Call]] = [[] for _ in range(episodes)]
    memory = prefix[:, :0]
    for t in range(calls):
        observation = rng.integers(3, VOCABULARY, (episodes, 30 if t else 0))
        prompts = np.concatenate([prefix, memory, observation], axis=1)
        completions, logprobs = _sample(model, prompts, length=24)
        spans = _segments(prefix.shape[1], memory.shape[1], observation.shape[1], t)
        for e in range(episodes):
            call = Call(prompts[e], completions[e], logprobs[e], StopReason.LENGTH, segments=spans)
            recorded[e].append(call)
        memory = completions
    sampling = Sampling(temperature=1.0, max_tokens=24)
    return model, [
        Episode(f"demo-{e:02d}", f"task-{e:02d}", tuple(recorded[e]), sampling=sampling, seed=seed, memory="mem1")
        for e in range(episodes)
    ]


@torch.no_grad()
def _sample(model: Any, prompts: np.ndarray[Any, Any], length: int) -> tuple[np.ndarray[Any, Any], ...]:
    """One batch of prompts of equal length, decoded with a key-value cache like any sampler."""
    ids, cache = torch.as_tensor(prompts), None
    tokens, logprobs = [], []
    for _ in range(length):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logp = out.logits[:, -1].float().log_softmax(-1)
        ids, cache = torch.multinomial(logp.exp(), 1), out.past_key_values
        tokens.append(ids)
        logprobs.append(logp.gather(-1, ids))
    return torch.cat(tokens, 1).numpy(), torch.cat(logprobs, 1).numpy()


def _segments(q: int, memory: int, observation: int, t: int) -> tuple[Segment, ...]:
    spans = [Segment("prefix", 0, q)]
    if t > 0:
        spans.append(Segment("memory", q, q + memory, source=t - 1))
        spans.append(Segment("observation", q + memory, q + memory + observation, source=t - 1))
    return tuple(spans)
