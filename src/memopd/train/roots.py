"""Loads the models of a run: each by itself, or with LoRA as adapters over one frozen base.

With LoRA the student and the critic are adapters that are trained. The reference is the adapter that the student
started from, frozen, or the bare base. A teacher on the same base is an adapter too, or the bare base; one on another
base is a model of its own, with its own adapter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from memopd.config import LoraSettings, RunConfig
from memopd.models.adapters import (
    adapted_layers,
    adapter_weights,
    add_adapter,
    check_adapter,
    empty_model,
    is_adapter_weight,
    load_adapter,
    new_config,
    same_base,
)
from memopd.models.load import critic_from, critic_over, load_causal_lm
from memopd.score import Head
from memopd.train import ranks
from memopd.train.models import (
    Base,
    PolicyRoot,
    StatesRoot,
    ValueRoot,
    master_dtype,
    prepare,
    prepare_base,
    teacher_head,
)

log = logging.getLogger("memopd")


@dataclass(frozen=True, slots=True)
class Roots:
    student: PolicyRoot
    critic: ValueRoot | None
    reference: PolicyRoot | None
    teacher: StatesRoot | None
    head: Head | None  # the teacher's


def separate_roots(config: RunConfig, device: torch.device, needs_critic: bool, guided: bool) -> Roots:
    """Every model by itself, loaded one after the other, so that host memory holds few whole models at a time."""
    m = config.model
    student, critic, reference = load_causal_lm(m.student, master_dtype(m), config.run.seed), None, None
    if needs_critic:
        critic = prepare(ValueRoot(critic_from(student), m.attention), m, device, trained=True)
    root = prepare(PolicyRoot(student, m.attention), m, device, trained=True)
    if config.optimise.reference:
        frozen = load_causal_lm(m.student, getattr(torch, m.dtype), config.run.seed)
        reference = prepare(PolicyRoot(frozen, m.attention), m, device, trained=False)
    teacher, head = _separate_teacher(config, device) if guided else (None, None)
    return Roots(root, critic, reference, teacher, head)


def _separate_teacher(config: RunConfig, device: torch.device) -> tuple[StatesRoot, Head]:
    m = config.model
    if m.teacher_adapter:
        check_adapter(m.teacher_adapter, m.teacher)
    frozen = load_causal_lm(m.teacher, getattr(torch, m.dtype))
    if m.teacher_adapter:
        load_adapter(frozen, m.teacher_adapter, "teacher")
    head = teacher_head(frozen, device)
    return prepare(StatesRoot(frozen, m.attention), m, device, trained=False), head


# ---- LoRA -------------------------------------------------------------------------------------------------------


def roots_over_one_base(config: RunConfig, device: torch.device, needs_critic: bool, guided: bool) -> Roots:
    """The adapters are added before anything is sharded: FSDP must see all weights of a layer at once."""
    m = config.model
    model = _base_with_student(config, m.student)
    started = bool(m.adapter)
    if needs_critic:
        _add(model, config, "critic", trainable=True)
    if config.optimise.reference and started:
        _add(model, config, "reference", trainable=False)
    base = Base(model, critic_over(model) if needs_critic else None).to(device)
    shares_teacher = guided and same_base(m.student, m.teacher)
    head = None
    if shares_teacher:
        if m.teacher_adapter:
            check_adapter(m.teacher_adapter, m.teacher)
            load_adapter(model, m.teacher_adapter, "teacher")
        head = teacher_head(model, device)
    prepare_base(base, m, device)

    student = _student_root(base, config)
    critic, reference, teacher = None, None, None
    if needs_critic:
        critic = ValueRoot(base.critic, m.attention, base, "critic")
        value_head = {f"score.{name}": value for name, value in base.critic.score.named_parameters()}
        critic.weights = adapter_weights(model, "critic") | value_head
    if config.optimise.reference:
        reference = PolicyRoot(model, m.attention, base, "reference" if started else None)
    if shares_teacher:
        teacher = StatesRoot(model, m.attention, base, "teacher" if m.teacher_adapter else None)
    elif guided:
        teacher, head = _separate_teacher(config, device)
    return Roots(student, critic, reference, teacher, head)


def student_over_base(config: RunConfig, path: str, device: torch.device) -> PolicyRoot:
    """A student alone, for supervised training."""
    if path.endswith(".json"):
        raise ValueError(f"{path}: has no weights to keep frozen: name a model's folder, or set lora.rank to 0")
    base = Base(_base_with_student(config, path))
    prepare_base(base, config.model, device)
    return _student_root(base, config)


def check_adapters(config: RunConfig) -> None:
    """Check what can be checked of the settings alone."""
    if config.model.adapter and not config.lora.rank:
        raise ValueError("model.adapter: set lora.rank to train it, or merge it into its base first (memopd merge)")
    for name in ("alpha", "targets"):
        if not config.lora.rank and getattr(config.lora, name) != getattr(LoraSettings(), name):
            raise ValueError(
                f"lora.{name}: set lora.rank to train adapters; with lora.rank = 0 all weights are trained"
            )


def _base_with_student(config: RunConfig, path: str) -> torch.nn.Module:
    if config.model.adapter:
        _check_start(config, path)
    model = load_causal_lm(path, getattr(torch, config.model.dtype))
    torch.manual_seed(config.run.seed)  # new adapters start at random
    _add(model, config, "student", trainable=True)
    return model


def _add(model: torch.nn.Module, config: RunConfig, name: str, trainable: bool) -> None:
    """An adapter as the student's is at its start."""
    if config.model.adapter:
        load_adapter(model, config.model.adapter, name, trainable)
    else:
        add_adapter(model, new_config(config.lora.rank, config.lora.scale, config.lora.targets), name, trainable)


def _check_start(config: RunConfig, path: str) -> None:
    """The start adapter must be what [lora] says, or the settings of the run would not describe it."""
    found, wanted = check_adapter(config.model.adapter, path), config.lora
    if not found.uniform:
        raise ValueError(
            f"model.adapter: {found.folder} has other ranks or scales than lora.rank and lora.alpha can say "
            "(rank_pattern, alpha_pattern or use_rslora): start from another one, or merge it first (memopd merge)"
        )
    empty = empty_model(path)
    add_adapter(empty, new_config(wanted.rank, wanted.scale, wanted.targets), "student", trainable=False)
    if (found.rank, found.alpha, found.layers) != (wanted.rank, wanted.scale, adapted_layers(empty, "student")):
        targets = sorted({name.rsplit(".", 1)[-1] for name in found.layers})
        raise ValueError(
            f"model.adapter: {found.folder} has lora.rank = {found.rank}, lora.alpha = {found.alpha:g} and "
            f"lora.targets = {','.join(targets)}: give these settings"
        )


def _student_root(base: Base, config: RunConfig) -> PolicyRoot:
    root = PolicyRoot(base.model, config.model.attention, base, "student")
    root.weights = adapter_weights(base.model, "student")
    root.frozen = {name: p for name, p in base.model.named_parameters() if not is_adapter_weight(name)}
    if ranks.rank() == 0:
        trained, kept = (sum(p.numel() for p in group.values()) / 1e6 for group in (root.weights, root.frozen))
        log.info("lora: an adapter of %.2f M weights over a frozen base of %.1f M", trained, kept)
    return root
