"""The models of a run and their optimisers, and the export of the trained policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from memopd.config import RunConfig
from memopd.files import whole_folder, write_digests
from memopd.models.adapters import save_adapter
from memopd.models.load import check_model_folder, check_same_tokenizer
from memopd.score import Divergence, Head, divergence_of
from memopd.train import checkpoint, ranks
from memopd.train.algorithms import Algorithm, algorithm_of, needs_group
from memopd.train.models import PolicyRoot, Root, StatesRoot, ValueRoot, whole_weights
from memopd.train.roots import check_adapters, roots_over_one_base, separate_roots


@dataclass(frozen=True, slots=True)
class Learner:
    """The models of a run and their optimisers."""

    config: RunConfig
    device: torch.device
    student: PolicyRoot
    actor_optimiser: torch.optim.AdamW
    critic: ValueRoot | None
    critic_optimiser: torch.optim.AdamW | None
    reference: PolicyRoot | None
    teacher: StatesRoot | None
    head: Head | None  # the teacher's
    algorithm: Algorithm
    divergence: Divergence

    @contextmanager
    def passes(self) -> Iterator[None]:
        """A block around many passes of the trained models, which are checked and prepared once."""
        with self.student.passes(), nullcontext() if self.critic is None else self.critic.passes():
            yield

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The content of a checkpoint."""
        found = trained_tensors("student", self.student, self.actor_optimiser)
        if self.critic is not None and self.critic_optimiser is not None:
            found |= trained_tensors("critic", self.critic, self.critic_optimiser)
        return found

    def restore(self, folder: Path | None) -> None:
        """Continue from a checkpoint; without one, from the start."""
        checkpoint.restore(folder, self.tensors())
        for root in (self.student, self.critic):
            if root is not None:
                root.publish()


def build(config: RunConfig, device: torch.device) -> Learner:
    """Loads the models and makes their optimisers."""
    m, o = config.model, config.optimise
    if not m.student:
        raise ValueError("model.student: name a model folder or hub name to train")
    algorithm, divergence, guided = algorithm_of(o), divergence_of(config.teacher.divergence), is_guided(config)
    if guided:
        for path in (m.student, m.teacher):
            check_model_folder(path)  # a wrong path is not a missing tokenizer
        check_same_tokenizer(m.student, m.teacher)
    load = roots_over_one_base if config.lora.rank else separate_roots
    roots = load(config, device, algorithm.needs_critic, guided)
    optimiser, critic_optimiser = adamw(roots.student, o.lr, o.weight_decay), None
    if roots.critic is not None:
        critic_optimiser = adamw(roots.critic, o.critic_lr, o.weight_decay)
    return Learner(
        config,
        device,
        roots.student,
        optimiser,
        roots.critic,
        critic_optimiser,
        roots.reference,
        roots.teacher,
        roots.head,
        algorithm,
        divergence,
    )


def check_objective(config: RunConfig) -> None:
    """Check that the algorithm and the divergence of a run resolve. Called before any model is loaded."""
    check_adapters(config)
    o, algorithm = config.optimise, algorithm_of(config.optimise)
    if needs_group(algorithm) and o.samples < 2 and not config.sampling.replay:
        raise ValueError(
            f'optimise.algorithm = "{o.algorithm}" compares the episodes of a task: optimise.samples must be 2 or more'
        )
    divergence_of(config.teacher.divergence)


def is_guided(config: RunConfig) -> bool:
    """Whether there is a teacher. λ = 0 is PPO bit for bit, so the teacher is not even loaded."""
    if config.teacher.state == "none" or config.teacher.weight == 0:
        return False
    if not config.model.teacher:
        raise ValueError('model.teacher: name one, or set teacher.state to "none"')
    return True


def adamw(root: Root, lr: float, weight_decay: float) -> torch.optim.AdamW:
    # Fused on a GPU, because the other implementations temporarily need a third copy of the weights.
    fused = next(iter(root.weights.values())).is_cuda
    return torch.optim.AdamW(root.weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused)


def trained_tensors(name: str, root: Root, optimiser: torch.optim.AdamW) -> dict[str, dict[str, Tensor]]:
    state = checkpoint.optimiser_tensors(optimiser, root.weights)
    return {name: root.weights, f"{name}-optimiser": state}


def export_policy(output: Path, root: PolicyRoot, tokenizer: Any, base: str) -> None:
    """Write what was trained: RUN/adapter with LoRA, of the model `base`, otherwise RUN/model."""
    if root.adapter is None:
        export_model(output, root, tokenizer)
        return
    weights = {name: value.cpu() for name, value in whole_weights(root) if ranks.rank() == 0}
    if ranks.rank() == 0:
        save_adapter(output / "adapter", root.model, root.adapter, base, tokenizer, weights)
    ranks.barrier()


def export_model(output: Path, root: PolicyRoot, tokenizer: Any) -> None:
    """Write the trained policy to RUN/model, where any Hugging Face program can load it.

    `digests.json` is for our own readers: they notice a file that was damaged later.
    """
    first = ranks.rank() == 0
    weights = {name: value.cpu() for name, value in whole_weights(root) if first}
    if first:
        # `save_pretrained` writes the precision of the model's weights to config.json, and the masters are exported.
        precise = nullcontext() if root.masters is None else root.masters.in_model()
        with whole_folder(output / "model") as folder, precise:
            tokenizer.save_pretrained(folder)
            try:
                root.model.save_pretrained(folder, state_dict=weights)
            except SafetensorError as error:
                raise OSError(f"{output / 'model'}: cannot be written ({error}); --resume writes it again") from None
            write_digests(folder)
    ranks.barrier()
