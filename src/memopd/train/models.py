"""The models of one update, π_θ, V_φ, π_ref and π_T, and the root modules that run and shard them.

FSDP gathers a group's weights when the group's own `forward` runs, so the root must run backbone *and* head; calling
only the backbone of a sharded model fails. Tied embeddings stay in the root group. With LoRA several roots run one
model, each with its own adapter; then their `Base` is what FSDP shards, and every pass goes through it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from memopd.compile import Packed
from memopd.config import ModelConfig
from memopd.models.adapters import activate_in, add_adapter, tuner_layers
from memopd.models.compiled import can_compile, prepare_layers
from memopd.models.load import backbone
from memopd.models.support import sharing
from memopd.score import Head, Target, decision_states, head_of, many_passes, score
from memopd.train import ranks
from memopd.train.masters import Masters

COMPILED = ("cuda",)  # devices on which the layers are compiled


class Base(nn.Module):
    """A frozen model in memory once, and the adapters over it. `critic` has the same backbone, and its own head."""

    def __init__(self, model: Any, critic: Any = None) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self._layers: list[Any] = []  # those with adapters

    def forward(self, adapter: str | None, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a pass with a root's adapter. It stays active: with checkpointing, the backward pass runs layers anew."""
        self.activate(adapter)
        return run(*arguments)

    def activate(self, adapter: str | None) -> None:
        self._layers = self._layers or tuner_layers(self.model)
        activate_in(self._layers, adapter)


class Root(nn.Module):
    """A module around a model, whose `forward` is the one pass that training needs, its `run`."""

    def __init__(self, model: Any, attention: str, base: Base | None = None, adapter: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.base = base  # None: the model is this root's own
        self.adapter = adapter  # over the base; None: the bare base
        # As the optimiser sees them: only this rank's rows if sharded.
        self.weights: dict[str, Tensor] = {}  # those that are trained; of a frozen model all
        self.frozen: dict[str, Tensor] = {}  # those of the base below a trained adapter
        self.host: list[
            tuple[Tensor, Tensor]
        ] = []  # while `on_device`: the parameters and their weights in host memory
        self.uses = 0  # of `on_device`
        self.masters: Masters | None = None  # of a model that computes in another precision than it is trained in

    def forward(self, *arguments: Any) -> Any:
        if self.base is None:
            return self.run(*arguments)
        return self.base(self.adapter, self.run, *arguments)

    def run(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def passes(self) -> AbstractContextManager[Any]:
        """A block around many passes, in which the model is checked and prepared once."""
        return many_passes(self.model)

    def publish(self) -> None:
        """Make the model compute with `weights` after they changed."""
        if self.masters is not None:
            self.masters.publish()

    def activate(self) -> None:
        """Make the model compute with this root's adapter, for those who run it without the root."""
        if self.base is not None:
            self.base.activate(self.adapter)


class PolicyRoot(Root):
    def run(self, packed: Packed, temperature: float, teacher: Target | None = None) -> tuple[Tensor, ...]:
        """(log p, entropy[, divergence from the teacher]) at the decisions."""
        scores = score(self.model, [packed], temperature, self.attention, teacher)
        assert scores.logprob is not None
        assert scores.entropy is not None
        return (scores.logprob, scores.entropy) + (() if scores.divergence is None else (scores.divergence,))


class ValueRoot(Root):
    def run(self, packed: Packed) -> Tensor:
        """V at g(t, k)."""
        value = score(self.model, [packed], attention=self.attention).value
        assert value is not None
        return value


class StatesRoot(Root):
    """A frozen teacher. We keep its hidden states, never its logits."""

    def run(self, packed: Packed) -> Tensor:
        return decision_states(self.model, packed, self.attention)


def master_dtype(config: ModelConfig) -> torch.dtype:
    """The precision of the weights that the optimiser updates: small steps would vanish in half precision."""
    return torch.promote_types(getattr(torch, config.dtype), torch.float32)


def prepare(root: Any, config: ModelConfig, device: torch.device, trained: bool) -> Any:
    """Make a model ready to train, or freeze it. Shards it over several ranks.

    A frozen model that is not sharded starts in host memory; `on_device` puts it on the device to score.
    """
    model, dtype = root.model, getattr(torch, config.dtype)
    _no_dropout(model)
    root.train(trained)
    if trained and config.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not trained:
        model.requires_grad_(False)
    if trained or ranks.world() > 1:
        root.to(device)
    if isinstance(root, PolicyRoot):
        head_of(model)  # checks the head against the model's own logits, before the weights are sharded
    # Half precision has too few digits for a value, so the critic's head stays precise.
    precise = {f"score.{name}" for name, _ in model.score.named_parameters()} if isinstance(root, ValueRoot) else set()
    if ranks.world() > 1:
        _shard(root, dtype, master_dtype(config), bool(precise))
    elif trained and dtype != master_dtype(config):
        root.masters = Masters(model, dtype, precise)
    root.weights = dict(model.named_parameters()) if root.masters is None else root.masters.weights
    _compile(model, config, device)
    return root


def _shard(root: Root, dtype: torch.dtype, master: torch.dtype, has_value_head: bool) -> None:
    """FSDP2 with mixed precision: weights and their gradients are in `master`, passes in `dtype`."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master)
    for layer in _layers(root.model):
        fully_shard(layer, mp_policy=policy)
    if has_value_head:
        fully_shard(root.model.score, mp_policy=MixedPrecisionPolicy(param_dtype=master))
    fully_shard(root, mp_policy=policy)


def prepare_base(base: Base, config: ModelConfig, device: torch.device) -> None:
    """Make a base and its adapters ready to train. Shards them over several ranks.

    The adapters cast their precise weights themselves, so that one process needs no sharding for mixed precision, and
    the engine can sample from the very model that is trained.
    """
    _no_dropout(base.model)
    if base.critic is not None:
        _no_dropout(base.critic)
    base.train()
    if config.checkpointing:
        base.model.gradient_checkpointing_enable({"use_reentrant": False})
    base.to(device)
    head_of(base.model)  # checks the head against the model's own logits, before the weights are sharded
    if ranks.world() > 1:
        for layer in _layers(base.model):
            fully_shard(layer)
        if base.critic is not None:
            fully_shard(base.critic.score)
        fully_shard(base)
    _compile(base.model, config, device)


def _compile(model: Any, config: ModelConfig, device: torch.device) -> None:
    """On one GPU. Sharded layers were not tried."""
    wanted = config.compiled and device.type in COMPILED and ranks.world() == 1
    if wanted and sharing(model).shared and can_compile(device):
        prepare_layers(model)


def _layers(model: Any) -> Any:
    """The layers that FSDP gathers one by one. Raises an error that says what to do if it cannot."""
    name = type(model).__name__
    if not (can := sharing(model)).shared:
        # With one pass per call, ranks with different numbers of calls would wait for each other for ever.
        raise ValueError(f"{name} runs every call by itself ({can.reason}), which works on one rank only: train on one")
    layers = getattr(backbone(model), "layers", None)
    if layers is None:
        raise ValueError(f"{name} has no list of layers to shard: train it on one rank")
    return layers


MARGIN = 0.1  # of a GPU's memory, which later updates may need beyond those so far


@contextmanager
def on_device(root: Root, device: torch.device) -> Iterator[None]:
    """Puts a frozen model on `device` inside the block. Its weights do not change, so none are copied back.

    From its second use on, when an update has shown what it needs, the model stays there while there is room for it.
    A model over a base that is trained is there anyway.
    """
    if root.base is not None:
        yield
        return
    root.host = root.host or [(p, p.data) for p in root.parameters() if p.device != device]
    root.to(device)
    try:
        yield
    finally:
        root.uses += 1
        size = sum(weights.nbytes for _, weights in root.host)
        if root.host and (root.uses == 1 or not has_room(device, size)):
            for parameter, weights in root.host:
                parameter.data = weights
            root.host = []


def has_room(device: torch.device, size: int) -> bool:
    """Whether the largest need of memory so far left `size` bytes free, and a margin."""
    free, total = torch.cuda.mem_get_info(device)
    ours = free + torch.cuda.memory_reserved(device)  # what other processes leave to this one
    return ours - torch.cuda.max_memory_allocated(device) >= size + MARGIN * total


def teacher_head(model: Any, device: torch.device) -> Head:
    """The frozen head by itself, whole on every rank: the divergence reads it after the teacher's layers have run."""
    head = head_of(model)
    bias = None if head.bias is None else head.bias.detach().to(device)
    return replace(head, weight=head.weight.detach().to(device), bias=bias)


def whole_weights(root: Root) -> Iterator[tuple[str, Tensor]]:
    """Every trained weight, one at a time, whole on every rank. All ranks must call it."""
    for name, value in root.weights.items():
        yield name, _whole(value)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def is_sharded(root: Root) -> bool:
    return any(isinstance(value, DTensor) for value in root.weights.values())


def whole_copy(root: Root, dtype: str) -> Any:
    """A whole, frozen model of the same shape, in the given precision; `copy_weights` fills it."""
    config = copy.deepcopy(root.model.config)  # so that each model has its own attention setting
    with next(iter(root.weights.values())).device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if root.adapter is not None:
            add_adapter(model, root.model.peft_config[root.adapter], root.adapter, trainable=False)
    model.generation_config = root.model.generation_config  # which tokens end a response
    return model.eval().requires_grad_(False)


def copy_weights(root: Root, model: Any, frozen: bool = True) -> None:
    """Copy the weights of a root into its `whole_copy`; without `frozen`, only those that training changes."""
    targets = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in (root.weights | (root.frozen if frozen else {})).items():
            targets[name].copy_(_whole(value))  # one by one: all of them whole at once would be another model in memory


def _no_dropout(model: Any) -> None:
    """Set dropout to 0, because calls that share rows would share its masks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    for name, value in vars(model.config).items():
        if name.endswith("dropout") and isinstance(value, float):
            setattr(model.config, name, 0.0)
