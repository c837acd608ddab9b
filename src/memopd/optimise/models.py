"""The five models of one update: π_θ, V_φ, π_ref, π_T, and the roots through which they are run and sharded.

FSDP gathers a group's weights when the group's own `forward` runs, so the root must do backbone *and* head; calling
the backbone of a sharded model by itself fails. Tied embeddings stay in the root group.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memopd.compile import Packed
from memopd.config import ModelConfig
from memopd.optimise import ranks
from memopd.score import Head, Target, decision_states, head_of, score
from memopd.score.states import backbone


class Root(nn.Module):
    """A model under the one forward pass that training needs of it."""

    def __init__(self, model: Any, attention: str) -> None:
        super().__init__()
        self.model = model
        self.attention = attention


class PolicyRoot(Root):
    def forward(
        self, packed: Packed, temperature: float, head: Head | None = None, states: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(log p, entropy[, reverse KL]) at the decisions; `head` and `states` are the teacher's."""
        target = None if head is None or states is None else Target(head, states)
        scores = score(self.model, [packed], temperature, self.attention, target)
        assert scores.logprob is not None
        assert scores.entropy is not None
        return (scores.logprob, scores.entropy) + (() if scores.divergence is None else (scores.divergence,))


class ValueRoot(Root):
    def forward(self, packed: Packed) -> Tensor:
        """V at g(t, k)."""
        value = score(self.model, [packed], attention=self.attention).value
        assert value is not None
        return value.float()


class StatesRoot(Root):
    """A frozen teacher: its hidden states are kept, its logits never are."""

    def forward(self, packed: Packed) -> Tensor:
        return decision_states(self.model, packed, self.attention)


def load_causal_lm(path: str, seed: int = 0) -> Any:
    """A model folder or hub name in float32; a config.json alone gives random weights from the seed."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if path.endswith(".json"):
        config = transformers.AutoConfig.for_model(**_json(path))
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_local(path)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )


def critic_from(student: Any) -> Any:
    """V_φ: the student's backbone and a value head that starts at zero."""
    config = copy.deepcopy(student.config)
    config.num_labels = 1
    for name in ("classifier_dropout", "hidden_dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    critic = transformers.AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    backbone(critic).load_state_dict(backbone(student).state_dict())
    nn.init.zeros_(critic.score.weight)
    if critic.score.bias is not None:
        nn.init.zeros_(critic.score.bias)
    return critic


def prepare(root: Root, config: ModelConfig, device: torch.device, trained: bool) -> Any:
    """On its device, ready to train or frozen; sharded where there are ranks to share it or master weights to keep."""
    model = root.model
    _no_dropout(model)
    if not trained:
        model.requires_grad_(False)
        if ranks.world() == 1:
            return root.to(device, getattr(torch, config.dtype)).eval()
    root.to(device)
    if trained and config.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if isinstance(root, PolicyRoot):
        head_of(model)  # checks the head against the model's own logits while its weights are whole
    if ranks.world() > 1 or config.dtype != "float32":
        precision = getattr(torch, config.dtype)
        ranks.ensure_group(device)
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in backbone(model).layers:
            fully_shard(layer, mp_policy=policy)
        if isinstance(root, ValueRoot):  # three digits are too few for a value: its head stays in float32
            fully_shard(model.score, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        fully_shard(root, mp_policy=policy)
    return root.train() if trained else root.eval()


def teacher_head(model: Any, config: ModelConfig, device: torch.device) -> Head:
    """The frozen head by itself, whole on every rank: the divergence reads it when the teacher's layers are done."""
    head = head_of(model)
    dtype = getattr(torch, config.dtype)
    bias = None if head.bias is None else head.bias.detach().to(device, dtype)
    return replace(head, weight=head.weight.detach().to(device, dtype), bias=bias)


def whole_model(root: Root, dtype: str) -> Any:
    """The model itself where it is whole; where it is sharded, a copy in the precision it runs in."""
    if not any(type(m).__name__.startswith("FSDP") for m in root.modules()):
        return root.model
    device = next(root.parameters()).device
    with torch.device(device):
        made = type(root.model)(copy.deepcopy(root.model.config))
    return made.to(getattr(torch, dtype)).eval().requires_grad_(False)


def full_state(root: Root) -> dict[str, Tensor]:
    """Every weight of the model, whole, on every rank (a collective)."""
    state = root.model.state_dict()
    return {name: _whole(value) for name, value in state.items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _no_dropout(model: Any) -> None:
    """Shared rows would share masks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name, value in vars(model.config).items():
        if name.endswith("dropout") and isinstance(value, float):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _json(path: str) -> dict[str, Any]:
    import json

    return dict(json.loads(Path(path).read_text()))


def _check_local(path: str) -> None:
    looks_local = Path(path).exists() or path.startswith((".", "/")) or path.count("/") > 1
    if looks_local and not Path(path, "config.json").is_file():
        raise ValueError(f"{path}: there is no model here (no config.json)")
