"""MEM1-like episodes from a tiny random model, so that an audit runs on a bare clone.

The texts mean nothing; the calls are real: sampled token by token, with log-probabilities and segments recorded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memopd.types import Call, Episode, Sampling, Segment, StopReason
from memopd.verify.families import VOCABULARY, tiny_model


def demo(episodes: int = 16, calls: int = 5, seed: int = 0) -> tuple[Any, list[Episode]]:
    """A model and the episodes it sampled: |q| 40, responses of 24, observations of 30 ids."""
    model = tiny_model("qwen2", seed)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    prefix = rng.integers(3, VOCABULARY, (episodes, 40))
    recorded: list[list[Call]] = [[] for _ in range(episodes)]
    memory = prefix[:, :0]
    for t in range(calls):
        observation = rng.integers(3, VOCABULARY, (episodes, 30 if t else 0))
        prompts = np.concatenate([prefix, memory, observation], axis=1)
        completions, logprobs = sample(model, prompts, length=24)
        spans = segments(prefix.shape[1], memory.shape[1], observation.shape[1], t)
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
def sample(model: Any, prompts: np.ndarray[Any, Any], length: int) -> tuple[np.ndarray[Any, Any], ...]:
    """One batch of equally long prompts, decoded with a key-value cache as any sampler does."""
    ids, cache = torch.as_tensor(prompts), None
    tokens, logprobs = [], []
    for _ in range(length):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logp = out.logits[:, -1].float().log_softmax(-1)
        ids, cache = torch.multinomial(logp.exp(), 1), out.past_key_values
        tokens.append(ids)
        logprobs.append(logp.gather(-1, ids))
    return torch.cat(tokens, 1).numpy(), torch.cat(logprobs, 1).numpy()


def segments(q: int, memory: int, observation: int, t: int) -> tuple[Segment, ...]:
    spans = [Segment("prefix", 0, q)]
    if t > 0:
        spans.append(Segment("memory", q, q + memory, source=t - 1))
        spans.append(Segment("observation", q + memory, q + memory + observation, source=t - 1))
    return tuple(spans)
