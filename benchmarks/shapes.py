"""The data of the benchmarks: calls of the paper's shapes with random ids and models of real shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memopd.compile import Packed, compile_calls, side_by_side
from memopd.types import Call, Episode

VOCABULARY = 151_000  # ids are smaller than this, so that every model here has them


@dataclass(frozen=True, slots=True)
class Shape:
    """Trajectories of `calls` calls: [q, x_t] -> a_t, lengths ± 30 %, x_0 empty, every trajectory a task of its own."""

    calls: int
    trajectories: int
    q: int
    x: int
    a: int


SHAPES = {
    "q2": Shape(calls=4, trajectories=4, q=350, x=250, a=80),
    "q8": Shape(calls=8, trajectories=2, q=500, x=300, a=120),
    "q16": Shape(calls=16, trajectories=1, q=700, x=350, a=150),
}
NAMES = (*SHAPES, "audit", "append", "samples", "tree")


def episodes_of(name: str, batch: int = 1, seed: int = 0) -> list[Episode]:
    """Episodes of a named shape, `batch` times its trajectories."""
    rng = np.random.default_rng(seed)
    if name == "audit":
        return _audit(rng, batch)
    if name == "append":
        return [_append_only(rng, f"e{i}", calls=16, q=700, o=350, a=150) for i in range(batch)]
    if name == "samples":
        return [e for i in range(batch) for e in _samples(rng, f"t{i}", samples=8, q=1500, a=500)]
    if name == "tree":
        return [_forking(rng, f"e{i}", turns=4, q=700, o=350, a=150) for i in range(batch)]
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: choose from {', '.join(NAMES)}")
    shape = SHAPES[name]
    shape = replace(shape, trajectories=batch * shape.trajectories)
    return [rewriting(rng, f"e{i}", shape) for i in range(shape.trajectories)]


def rewriting(rng: np.random.Generator, id: str, shape: Shape) -> Episode:
    q = _ids(rng, _about(rng, shape.q))
    calls = []
    for t in range(shape.calls):
        x = _ids(rng, _about(rng, shape.x) if t else 0)
        calls.append(Call(np.concatenate([q, x]), _ids(rng, _about(rng, shape.a))))
    return Episode(id, id, tuple(calls))


def _audit(rng: np.random.Generator, batch: int) -> list[Episode]:
    """The paper's audit: 64 MEM1 trajectories, 199 calls, 12,083 sampled tokens, 66,830 of observations."""
    episodes = []
    for b in range(batch):
        counts = np.full(64, 3)
        counts[rng.choice(64, 7, replace=False)] += 1  # 199 calls
        answers = _split(rng, 12_083, 199)
        observations = _split(rng, 66_830, 199 - 64)
        for e, count in enumerate(counts):
            q = _ids(rng, _about(rng, 350))
            calls: list[Call] = []
            memory = q[:0]
            for t in range(count):
                o = _ids(rng, observations.pop() if t else 0)
                calls.append(Call(np.concatenate([q, memory, o]), _ids(rng, answers.pop())))
                memory = calls[-1].completion
            episodes.append(Episode(f"e{b}-{e}", f"e{b}-{e}", tuple(calls)))
    return episodes


def _append_only(rng: np.random.Generator, id: str, calls: int, q: int, o: int, a: int) -> Episode:
    """An episode in which every call reads everything that was read and written before."""
    prompt, made = _ids(rng, q), []
    for _ in range(calls):
        made.append(Call(prompt, _ids(rng, _about(rng, a))))
        prompt = np.concatenate([prompt, made[-1].completion, _ids(rng, _about(rng, o))])
    return Episode(id, id, tuple(made))


def _samples(rng: np.random.Generator, task: str, samples: int, q: int, a: int) -> list[Episode]:
    """Samples of one prompt, each of one call: what most trainers call a group."""
    prompt = _ids(rng, _about(rng, q))
    return [Episode(f"{task}-{i}", task, (Call(prompt, _ids(rng, _about(rng, a))),)) for i in range(samples)]


def _forking(rng: np.random.Generator, id: str, turns: int, q: int, o: int, a: int) -> Episode:
    """An append-only history that forks in two, twice: every branch has `turns` calls of its own; depth first."""
    calls: list[Call] = []

    def grow(prompt: np.ndarray[Any, Any], forks: int) -> None:
        for _ in range(turns):
            calls.append(Call(prompt, _ids(rng, _about(rng, a))))
            prompt = np.concatenate([prompt, calls[-1].completion, _ids(rng, _about(rng, o))])
        for _ in range(2 if forks else 0):
            grow(np.concatenate([prompt, _ids(rng, 20)]), forks - 1)  # each branch begins with its own words

    grow(_ids(rng, q), 2)
    return Episode(id, id, tuple(calls))


def _about(rng: np.random.Generator, length: int) -> int:
    return round(length * rng.uniform(0.7, 1.3))


def _split(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """Positive integers that add up to `total`, each within about 30 % of the mean."""
    sizes = np.floor(rng.uniform(0.7, 1.3, parts) * total / parts).astype(int)
    sizes[: abs(total - sizes.sum()) % parts] += np.sign(total - sizes.sum())
    sizes += (total - sizes.sum()) // parts
    sizes[0] += total - sizes.sum()
    return [int(s) for s in sizes]


def _ids(rng: np.random.Generator, length: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


# ---- the same calls without sharing -----------------------------------------------------------------------------


def independent(episodes: Sequence[Episode]) -> Packed:
    """Every call in its own rows, side by side: the states are exact, but every prefix is computed again."""
    calls = [c for e in episodes for c in e.calls]
    return side_by_side([compile_calls([c]) for c in calls], [[i] for i in range(len(calls))])


def merged_rows(episodes: Sequence[Episode]) -> Packed:
    """What trainers without a trie do at best: a call joins the row of its episode whose last call it extends."""
    packs, members, at = [], [], 0
    for episode in episodes:
        rows: list[list[int]] = []
        for t, call in enumerate(episode.calls):
            row = next((row for row in rows if _extends(call, episode.calls[row[-1]])), None)
            if row is None:
                rows.append([t])
            else:
                row.append(t)
        packs += [compile_calls([episode.calls[t] for t in row]) for row in rows]
        members += [[at + t for t in row] for row in rows]
        at += len(episode.calls)
    return side_by_side(packs, members)


def _extends(call: Call, before: Call) -> bool:
    whole = np.concatenate([before.prompt, before.completion])
    return len(call.prompt) >= len(whole) and np.array_equal(call.prompt[: len(whole)], whole)


# ---- models -----------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_model(name: str, dtype: Any, device: str, layers: int | None = None) -> Any:
    """A Qwen2 of the named shape with random weights, perhaps with fewer layers."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    if name not in MODELS:
        raise ValueError(f"unknown model shape {name!r}: choose from {', '.join(MODELS)}")
    torch.manual_seed(0)
    with torch.device(device):
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        sizes = MODELS[name] if layers is None else MODELS[name] | {"num_hidden_layers": layers}
        config = Qwen2Config(**sizes, max_position_embeddings=32_768, rope_parameters=rope)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
