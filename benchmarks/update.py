"""Measures one whole update at real shapes: scoring by π_old, π_ref, V_φ and π_T, and steps of actor and critic.

The same episodes are packed, and run with every call in its own rows; all other code is the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.shapes import episodes_of, random_model
from memopd.config import ModelConfig, OptimiseConfig, RunConfig, TeacherConfig
from memopd.models.load import critic_from
from memopd.score import reverse_kl
from memopd.train import ranks
from memopd.train.algorithms import algorithm_of
from memopd.train.batch import MiniBatch, compile_batches
from memopd.train.learner import Learner, adamw
from memopd.train.models import PolicyRoot, StatesRoot, ValueRoot, on_device, prepare, teacher_head
from memopd.train.scoring import Guide, Scored, exact_states, policy_scores, values
from memopd.train.terms import make_terms
from memopd.train.update import update_actor, update_critic


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    seconds: float
    peak_bytes: int  # of the whole device, during the stage


@dataclass(frozen=True, slots=True)
class UpdateResult:
    student: str
    teacher: str
    layout: str  # packed, or independent
    episodes: int
    calls: int
    decisions: int
    rows: int
    tokens: int  # rows that independent calls need
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.stages)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def run_update(student: str, teacher: str, device: str, batch: int = 16, dtype: str = "bfloat16") -> Iterator[Any]:
    """Measure `batch` times Q2's four trajectories. Each layout runs twice, and the second run is reported."""
    config = RunConfig(
        model=ModelConfig(dtype=dtype, checkpointing=True),  # type: ignore[arg-type]  # the class checks it
        optimise=OptimiseConfig(mini_batch=10**9),
        teacher=TeacherConfig(weight=0.02),
    )
    learner = build(config, student, teacher, torch.device(device))
    episodes = episodes_of("q2", batch)
    episodes = [replace(e, reward=float(i % 3)) for i, e in enumerate(episodes)]
    for layout, share in (("packed", True), ("independent", False)):
        [mini] = compile_batches(episodes, replace(config.optimise, share=share), 0, 0)
        for _ in range(2):
            stages = tuple(one_update(learner, mini))
        yield UpdateResult(
            student, teacher, layout, len(episodes), len(mini.calls), len(mini), mini.rows, mini.tokens, stages
        )
    ranks.stop()


def build(config: RunConfig, student: str, teacher: str, device: torch.device) -> Learner:
    """Build a learner like `learner.build`, but with random weights, made on the device because it is faster."""
    m, o = config.model, config.optimise
    dtype = getattr(torch, m.dtype)
    frozen_teacher = random_model(teacher, dtype, str(device))
    head = teacher_head(frozen_teacher, device)
    pi_T = prepare(StatesRoot(frozen_teacher.to("cpu"), m.attention), m, device, trained=False)
    pi_ref = prepare(
        PolicyRoot(random_model(student, dtype, str(device)).to("cpu"), m.attention), m, device, trained=False
    )
    _tidy()
    policy = random_model(student, torch.float32, str(device))
    value = prepare(ValueRoot(critic_from(policy), m.attention), m, device, trained=True)
    pi = prepare(PolicyRoot(policy, m.attention), m, device, trained=True)
    _tidy()
    return Learner(
        config, device, pi, adamw(pi, o.lr, 0.0), value, adamw(value, o.critic_lr, 0.0), pi_ref, pi_T, head,
        algorithm_of(o), reverse_kl,
    )  # fmt: skip


def one_update(learner: Any, batch: MiniBatch) -> Iterator[Stage]:
    """Run one update. `learner` comes from `build`: it has a reference, a critic and a teacher."""
    o, temperature = learner.config.optimise, 1.0
    found: dict[str, Any] = {}

    def stage(name: str, work: Callable[[], Any]) -> Stage:
        _sync()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        found[name] = work()
        _sync()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return Stage(name, time.perf_counter() - begin, peak)

    def frozen(root: Any, work: Callable[[], Any]) -> Any:
        with on_device(root, learner.device):
            return work()

    yield stage("score π_old", lambda: policy_scores(learner.student, batch, temperature))
    yield stage(
        "score π_ref",
        lambda: frozen(learner.reference, lambda: policy_scores(learner.reference, batch, temperature)),
    )
    yield stage("score V_φ", lambda: values(learner.critic, batch))
    yield stage("score π_T", lambda: frozen(learner.teacher, lambda: exact_states(learner.teacher, batch)))
    old = found["score π_old"]
    scored = Scored(old, found["score π_ref"], found["score V_φ"], torch.ones(len(old), dtype=torch.bool).numpy())
    yield stage("advantages", lambda: make_terms([batch], [scored], learner.algorithm)[0][0])
    guide = Guide(learner.head, found["score π_T"], torch.ones(len(old), dtype=torch.bool))
    terms = found["advantages"]
    yield stage("update actor", lambda: update_actor(learner, batch, terms, guide))
    learner.actor_optimiser.zero_grad(set_to_none=True)
    yield stage("update critic", lambda: update_critic(learner.critic, learner.critic_optimiser, batch, terms, o))
    learner.critic_optimiser.zero_grad(set_to_none=True)


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
