"""Measures training steps with LoRA and of all weights: memory by part, seconds by stage, in one run.

Both arms sample, score and update with a critic and a teacher, on the same tasks, with the same budget and with
gradient checkpointing. The learning rates are 0, so that both arms sample from the same policy in every step. The first
step warms up, and the second is reported.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from benchmarks.update import Stage
from memopd.agent.codec import codec_of
from memopd.config import RunConfig
from memopd.models.load import load_tokenizer
from memopd.train import ranks
from memopd.train.batch import compile_batches, usable
from memopd.train.learner import Learner, build
from memopd.train.scoring import score_batches
from memopd.train.source import Sampler
from memopd.train.terms import make_terms
from memopd.train.update import update

STEPS = 2


@dataclass(frozen=True, slots=True)
class LoraResult:
    arm: str  # lora, or full
    lora_rank: int  # 0: full
    student: str
    teacher: str
    trained: int  # weights that the optimisers change, student and critic together
    episodes: int
    calls: int
    tokens: int
    rows: int
    weights_bytes: int  # of all models on the device at rest
    host_bytes: int  # of frozen models that wait in host memory
    copy_bytes: int  # of the whole copy that the engine samples from
    optimiser_bytes: int
    cache_bytes: int  # of the engine: what sampling leaves allocated; 0 on a CPU
    activation_bytes: int  # what the update needs on top, gradients included; 0 on a CPU
    stages: tuple[Stage, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": sum(s.seconds for s in self.stages)}


def run_lora(config: RunConfig, device: torch.device) -> Iterator[LoraResult]:
    """Measure `config`, which has lora.rank, and then the same with all weights."""
    config = replace(config, optimise=replace(config.optimise, lr=0.0, critic_lr=0.0, steps=STEPS))
    for arm in (config, replace(config, lora=replace(config.lora, rank=0))):
        yield measure_arm(arm, device)
        ranks.stop()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure_arm(config: RunConfig, device: torch.device) -> LoraResult:
    learner = build(config, device)
    tokenizer = load_tokenizer(config.model.student)
    with TemporaryDirectory() as folder:
        source = Sampler(config, learner.student, tokenizer, Path(folder))
        with closing(source):
            before, cache = _allocated(), 0
            for step in range(STEPS):
                stages: list[Stage] = []
                with staged("sample", stages):
                    episodes = source.episodes(step)
                cache = cache or _allocated() - before
                with staged("compile", stages):
                    kept, _ = usable(episodes, config.optimise.budget, config.sampling.temperature)
                    batches = compile_batches(kept, config.optimise, config.run.seed, step)
                with staged("score", stages):
                    scored, guides = score_batches(learner, batches, codec_of(tokenizer).decode)
                with staged("advantages", stages):
                    terms, _ = make_terms(batches, scored, learner.algorithm)
                at_rest = _allocated()
                with staged("update", stages):
                    update(learner, batches, terms, guides, step)
            engine_model: Any = source.policy.model  # type: ignore[union-attr]  # a local policy: no servers are named
            copied = [] if engine_model is learner.student.model else list(engine_model.parameters())
    here, host = _weights(learner, device)
    return LoraResult(
        arm="lora" if config.lora.rank else "full",
        lora_rank=config.lora.rank,
        student=config.model.student,
        teacher=config.model.teacher,
        trained=sum(w.numel() for name in ("student", "critic") for w in learner.tensors()[name].values()),
        episodes=len(kept),
        calls=sum(len(b.calls) for b in batches),
        tokens=sum(b.tokens for b in batches),
        rows=sum(b.rows for b in batches),
        weights_bytes=here,
        host_bytes=host,
        copy_bytes=_bytes(copied),
        optimiser_bytes=_bytes(
            w for name, group in learner.tensors().items() if name.endswith("-optimiser") for w in group.values()
        ),
        cache_bytes=cache,
        activation_bytes=max(0, stages[-1].peak_bytes - at_rest),
        stages=tuple(stages),
    )


@contextmanager
def staged(name: str, into: list[Stage]) -> Iterator[None]:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize()
    into.append(Stage(name, time.perf_counter() - begin, torch.cuda.max_memory_allocated() if cuda else 0))


def _weights(learner: Learner, device: torch.device) -> tuple[int, int]:
    """The bytes of all weights on the device, and of those in host memory. Shared weights count once."""
    roots = (learner.student, learner.critic, learner.reference, learner.teacher)
    held: list[torch.Tensor] = [p for root in roots if root is not None for p in root.parameters()]
    held += [] if learner.head is None else [learner.head.weight]
    on_device = [p for p in held if p.device.type == device.type]
    return _bytes(on_device), _bytes(p for p in held if p.device.type != device.type)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
