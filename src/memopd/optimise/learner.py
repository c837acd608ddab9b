"""The models of a run, their optimisers, and the trained policy at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memopd.config import RunConfig
from memopd.files import whole_folder
from memopd.optimise import checkpoint, ranks
from memopd.optimise.models import (
    PolicyRoot,
    StatesRoot,
    ValueRoot,
    critic_from,
    full_state,
    load_causal_lm,
    prepare,
    teacher_head,
)
from memopd.score import Head
from memopd.score.tokenizers import check_same_tokenizer


@dataclass(slots=True)
class Learner:
    """The models of a run and their optimisers."""

    config: RunConfig
    student: PolicyRoot
    reference: PolicyRoot | None
    critic: ValueRoot | None
    teacher: StatesRoot | None
    head: Head | None  # the teacher's
    actor_optimiser: torch.optim.AdamW
    critic_optimiser: torch.optim.AdamW | None

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint holds."""
        found: dict[str, dict[str, torch.Tensor]] = {"student": dict(self.student.named_parameters())}
        found["student-optimiser"] = _optimiser_tensors(self.student, self.actor_optimiser)
        if self.critic is not None and self.critic_optimiser is not None:
            found["critic"] = dict(self.critic.named_parameters())
            found["critic-optimiser"] = _optimiser_tensors(self.critic, self.critic_optimiser)
        return found


def build(config: RunConfig, device: torch.device) -> Learner:
    student = load_causal_lm(config.model.student, config.run.seed)
    gae_run, guided = config.optimise.advantages == "gae", _guided(config)
    critic = ValueRoot(critic_from(student), config.model.attention) if gae_run else None
    reference = PolicyRoot(load_causal_lm(config.model.student, config.run.seed), config.model.attention)
    teacher, head = None, None
    if guided:
        if not config.model.teacher:
            raise ValueError('model.teacher: name one, or set teacher.state to "none"')
        check_same_tokenizer(config.model.student, config.model.teacher)
        loaded = load_causal_lm(config.model.teacher)
        head = teacher_head(loaded, config.model, device)
        teacher = prepare(StatesRoot(loaded, config.model.attention), config.model, device, trained=False)
    root = prepare(PolicyRoot(student, config.model.attention), config.model, device, trained=True)
    critic = None if critic is None else prepare(critic, config.model, device, trained=True)
    o = config.optimise
    return Learner(
        config,
        root,
        prepare(reference, config.model, device, trained=False) if o.reference else None,
        critic,
        teacher,
        head,
        adamw(root, o.lr, o.weight_decay),
        None if critic is None else adamw(critic, o.critic_lr, o.weight_decay),
    )


def export_model(output: Path, root: PolicyRoot, tokenizer: Any) -> None:
    """RUN/model: the trained policy as any Hugging Face program loads it."""
    weights = {name: value.cpu() for name, value in full_state(root).items()}
    if ranks.rank() == 0:
        with whole_folder(output / "model") as folder:
            root.model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
            tokenizer.save_pretrained(folder)
    ranks.barrier()


def _guided(config: RunConfig) -> bool:
    """λ = 0 is PPO, to the bit: the teacher is not even loaded."""
    return config.teacher.state != "none" and config.teacher.weight > 0


def _optimiser_tensors(root: Any, optimiser: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    return checkpoint.optimiser_tensors(optimiser, {p: n for n, p in root.named_parameters()})


def adamw(root: Any, lr: float, weight_decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(root.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
