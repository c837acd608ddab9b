"""Measures an actor's forward and backward pass over the same calls, packed and not packed.

Every arm scores the same sampled tokens with the same model, the same vocabulary pass at the decisions only, and the
best attention kernel for its layout. They differ in the rows they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch._dynamo

from benchmarks.shapes import independent, merged_rows
from benchmarks.timing import Measured, measure
from memopd.attention import make_plan
from memopd.compile import Packed, compile_calls
from memopd.models.attention import planned_attention
from memopd.models.load import backbone
from memopd.score import head_of, vocabulary_scores
from memopd.types import Episode


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    rows: int
    seconds: float
    spread: float
    peak_bytes: int  # in addition to weights and gradients, which every arm has
    speedup: float  # relative to the fastest exact arm that shares no rows
    limit: float  # the speedup that the number of rows allows
    share: float  # speedup / limit
    memory: float  # peak_bytes relative to those of that arm
    utilisation: float  # 6 · parameters of the layers · rows / time / peak of a matrix product
    note: str = ""


@dataclass(frozen=True, slots=True)
class ActorResult:
    shape: str
    batch: int
    calls: int
    decisions: int
    checkpointing: bool
    baseline: str
    arms: tuple[Arm, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


UNSHARED = ("independent, padded SDPA", "independent, varlen flash")
DENSE_UP_TO = 16_384  # rows; beyond, the mask of one pack takes gigabytes and its products minutes

LONG = 25_000  # rows; steps of seconds vary little and need fewer repetitions


def compile_layers(model: Any) -> None:
    """Compile the layers, to fuse norms, rotary embeddings and activations; one graph serves packs of any size."""
    torch._dynamo.config.recompile_limit = 64  # one graph per arm and setting, each reused for packs of any size
    for layer in backbone(model).layers:
        layer.compile(dynamic=True)


def run_actor(
    model: Any,
    episodes: Sequence[Episode],
    shape: str,
    batch: int,
    peak: float,
    repeats: int = 5,
    compiled: bool = False,
) -> ActorResult:
    episodes = [replace(e, calls=kept) for e in episodes if (kept := tuple(c for c in e.calls if c.trainable))]
    calls = [c for e in episodes for c in e.calls]
    layouts = {
        "independent": independent(episodes),
        "merged": merged_rows(episodes),
        "packed": compile_calls(calls),
    }
    device = next(model.parameters()).device
    checkpointing = needs_checkpointing(model, len(layouts["independent"]), compiled)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # transformers checkpoints only while training; there is no dropout to switch on
    else:
        model.gradient_checkpointing_disable()
        model.eval()
    candidates: dict[str, tuple[int, Callable[[], Callable[[], None]]]] = {
        "independent, padded SDPA": (len(layouts["independent"]), lambda: _padded(model, episodes)),
        "independent, varlen flash": _arm(model, layouts["independent"], "cascade", device),
        "merged rows, varlen flash": _arm(model, layouts["merged"], "cascade", device),
        "packed, dense mask": _arm(model, layouts["packed"], "dense", device),
        "packed, flex": _arm(model, layouts["packed"], "flex", device),
        "packed, cascade": _arm(model, layouts["packed"], "cascade", device),
    }
    if len(layouts["merged"]) == len(layouts["independent"]):
        del candidates["merged rows, varlen flash"]  # no call extends another, so the rows would be the same
    kept = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())  # and their gradients
    measured: dict[str, tuple[int, Measured | None, str]] = {}
    for name, (rows, make) in candidates.items():
        try:
            if "dense" in name and rows > DENSE_UP_TO:
                raise ValueError(f"not tried over {DENSE_UP_TO} rows")
            long = rows > LONG
            times = measure(make(), min(repeats, 3) if long else repeats, 1 if long else 2, model.zero_grad)
            measured[name] = (rows, replace(times, peak_bytes=max(0, times.peak_bytes - kept)), "")
        except (ValueError, torch.OutOfMemoryError) as why:
            measured[name] = (rows, None, str(why).split("\n")[0][:90])
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    exact = {n: m for n in UNSHARED if (m := measured[n][1]) is not None}
    if not exact:
        raise ValueError(f"{shape} × {batch}: no unshared arm ran: {measured[UNSHARED[0]][2]}")
    baseline = min(exact, key=lambda n: exact[n].seconds)
    base_rows, base = measured[baseline][0], exact[baseline]
    parameters = sum(p.numel() for layer in backbone(model).layers for p in layer.parameters())
    results = []
    for name, (rows, m, note) in measured.items():
        if m is None:
            nan = float("nan")
            results.append(Arm(name, rows, nan, nan, 0, nan, base_rows / rows, nan, nan, nan, note))
            continue
        speedup, limit = base.seconds / m.seconds, base_rows / rows
        results.append(
            Arm(
                name, rows, m.seconds, m.spread, m.peak_bytes, speedup, limit, speedup / limit,
                m.peak_bytes / base.peak_bytes if base.peak_bytes else float("nan"),
                6 * parameters * rows / m.seconds / peak,
            )
        )  # fmt: skip
    decisions = len(layouts["packed"].decisions)
    return ActorResult(shape, batch, len(calls), decisions, checkpointing, baseline, tuple(results))


def _arm(model: Any, packed: Packed, kernel: str, device: torch.device) -> tuple[int, Callable[[], Callable[[], None]]]:
    def make() -> Callable[[], None]:
        plan = make_plan(packed, kernel, model)  # not timed, since training also makes it once per pack
        ids, positions = (torch.as_tensor(x, device=device).long()[None] for x in (packed.tokens, packed.positions))
        row, token = (torch.as_tensor(x, device=device).long() for x in (packed.decisions.row, packed.decisions.token))

        def step() -> None:
            with planned_attention(model):
                states = backbone(model)(
                    input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, memopd_scheme=plan
                ).last_hidden_state[0]
            _backward(model, states[row], token)

        return step

    return len(packed), make


def _padded(model: Any, episodes: Sequence[Episode]) -> Callable[[], None]:
    """A batch with one row per call, padded on the right. Attention is causal, so no decision sees padding."""
    device = next(model.parameters()).device
    calls = [c for e in episodes for c in e.calls]
    paths = [c.path for c in calls]
    ids = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.long, device=device)
    for line, path in zip(ids, paths, strict=True):
        line[: len(path)] = torch.as_tensor(path)
    row = [
        i * ids.shape[1] + np.arange(len(c.prompt) - 1, len(p))
        for i, (c, p) in enumerate(zip(calls, paths, strict=True))
    ]
    rows = torch.as_tensor(np.concatenate(row), device=device)
    token = torch.tensor(np.concatenate([c.completion for c in calls]), device=device).long()

    model.set_attn_implementation("sdpa")

    def step() -> None:
        states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        _backward(model, states[rows], token)

    return step


def _backward(model: Any, states: torch.Tensor, token: torch.Tensor) -> None:
    (-vocabulary_scores(head_of(model, check=False), states, token).logprob.mean()).backward()


def needs_checkpointing(model: Any, rows: int, compiled: bool) -> bool:
    """Whether the arm without sharing would not fit in memory otherwise. Then every arm uses checkpointing.

    In half precision, a row of Qwen2.5-3B's shape was measured to keep 125 kB per layer, or 87 kB when compiled.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return False
    config = model.config
    width = (0 if compiled else 18) * config.hidden_size + 8 * config.intermediate_size
    free = torch.cuda.get_device_properties(device).total_memory * 0.8
    return rows * config.num_hidden_layers * width * torch.finfo(model.dtype).bits / 16 > free
