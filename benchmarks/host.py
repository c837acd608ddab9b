"""What the host spends to start the passes of training: a GPU waits for it when its kernels are shorter.

The model has many layers of hardly any width, and an attention that computes nothing, so that starting kernels is all
that is left. CPU seconds of one thread, the arms in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from memopd.attention import make_plan, varlen
from memopd.compile import Packed, compile_calls
from memopd.models.adapters import activate, add_adapter, new_config
from memopd.models.compiled import prepare_layers
from memopd.score import decision_states, many_passes
from memopd.verify.families import VOCABULARY, demo

ARMS = ("layers as they are", "compiled, attention outside", "compiled, one graph")
PASSES = 20  # in a repetition, as over the packs of a stage


@dataclass(frozen=True, slots=True)
class HostResult:
    host_arm: str
    layers: int
    adapters: int
    forward: float  # CPU seconds of one pass without gradients
    training: float  # of one pass with its backward pass

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_host(layers: int, adapters: Sequence[int], repeats: int) -> Iterator[HostResult]:
    torch.set_num_threads(1)
    calls = [call for episode in demo(episodes=4)[1] for call in episode.calls]
    with computing_nothing():
        for count in adapters:
            works = [Work(arm, narrow_model(layers, count), compile_calls(calls)) for arm in ARMS]
            for work in works:  # compiles
                work.forward()
                work.train()
            seconds = [[(timed(w.forward), timed(w.train)) for w in works] for _ in range(repeats)]
            for arm, found in zip(ARMS, zip(*seconds, strict=True), strict=True):
                forward, training = (median(times) for times in zip(*found, strict=True))
                yield HostResult(arm, layers, count, forward, training)


@dataclass
class Work:
    arm: str
    model: Any
    packed: Packed

    def __post_init__(self) -> None:
        if self.arm != ARMS[0]:
            prepare_layers(self.model)
        plan: Any = make_plan(self.packed, "cascade", self.model)  # stays with the pack
        plan.traceable = self.arm == ARMS[2]

    def states(self) -> Tensor:
        return decision_states(self.model, self.packed, "cascade")

    def forward(self) -> None:
        with torch.no_grad(), many_passes(self.model):
            for _ in range(PASSES):
                self.states()

    def train(self) -> None:
        with many_passes(self.model):
            for _ in range(PASSES):
                self.states().sum().backward()


def timed(work: Callable[[], None]) -> float:
    """CPU seconds of a pass, which other work on the machine changes little."""
    begin = time.process_time()
    work()
    return (time.process_time() - begin) / PASSES


def narrow_model(layers: int, adapters: int) -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["full_attention"] * layers, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for number in range(adapters):
        add_adapter(model, new_config(8, 16, ("all-linear",)), f"adapter{number}", trainable=number == 0)
    if adapters:
        activate(model, "adapter0")
    return model.train()


@contextmanager
def computing_nothing() -> Iterator[None]:
    """Attention without its kernels. What is around them stays: gathers, the operator, its gradient."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.clone(), q.new_zeros(q.shape[1], q.shape[0])

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return grad.clone(), torch.zeros_like(k), torch.zeros_like(v)

    with patch.object(varlen, "forward", forward), patch.object(varlen, "backward", backward):
        yield
