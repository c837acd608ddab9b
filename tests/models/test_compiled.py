"""Compiled layers in training: the same numbers and gradients as the layers by themselves, with every adapter.

Here torch.compile's "eager" backend runs what was captured; tests/gpu runs the compiled kernels.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from calls import mem1_calls
from torch._dynamo.backends.debugging import aot_eager

from memopd.attention.cascade import CascadePlan
from memopd.compile import compile_calls
from memopd.models import compiled as compiled_module
from memopd.models.adapters import activate, adapter_weights, add_adapter, new_config
from memopd.models.compiled import can_compile, prepare_layers
from memopd.score import score
from memopd.verify.families import tiny_model


@dataclass
class Graphs:
    made: int = 0
    run: int = 0


def counted(monkeypatch, backend):
    """How many graphs were captured, and how often they ran, each as `backend` makes it."""
    count = Graphs()

    def counting(graph, inputs):
        count.made += 1
        made = backend(graph, inputs)

        def run(*arguments):
            count.run += 1
            return made(*arguments)

        return run

    compile_it = cache(lambda function: torch.compile(function, dynamic=True, backend=counting))
    monkeypatch.setattr(compiled_module, "compiled", compile_it)
    return count


@pytest.fixture
def graphs(monkeypatch):
    return counted(monkeypatch, lambda graph, _: graph)


@pytest.fixture
def joint_graphs(monkeypatch):
    """With their gradients."""
    torch._dynamo.reset()
    return counted(monkeypatch, aot_eager)


def adapted(checkpointing):
    model = tiny_model("qwen2").train()
    for name in ("student", "reference"):
        add_adapter(model, new_config(2, 4, ("all-linear",)), name, trainable=name == "student")
        torch.manual_seed(len(name))
        for weight in adapter_weights(model, name).values():
            torch.nn.init.normal_(weight, std=0.2)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def scored(model, packed, adapter):
    """log p and the adapter's gradients."""
    activate(model, adapter)
    model.zero_grad()
    logprob = score(model, [packed]).logprob
    if adapter != "student":
        return [logprob.detach()]
    logprob.sum().backward()
    return [logprob.detach(), *(w.grad.clone() for w in adapter_weights(model, "student").values())]


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_and_gradients_are_the_same_with_every_adapter(graphs, checkpointing):
    packed = compile_calls(mem1_calls(3))
    model = adapted(checkpointing)
    alone = {adapter: scored(model, packed, adapter) for adapter in ("student", "reference", None)}
    assert graphs.run == 0
    prepare_layers(model)
    for adapter in ("student", None, "reference", "student"):
        before = graphs.run
        for a, b in zip(alone[adapter], scored(model, packed, adapter), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert graphs.run > before
    assert not torch.equal(alone["student"][0], alone["reference"][0])


def test_with_paths_a_layer_is_one_graph(joint_graphs):
    """The same scores and gradients, and packs of other shapes run the same graph."""
    calls = (mem1_calls(4, calls=6, q=13), mem1_calls(5, calls=3), mem1_calls(6, calls=5))
    packs = [compile_calls(each) for each in calls]
    assert len({len(packed) for packed in packs}) == 3
    assert 64 not in [len(packed) for packed in packs]  # the model's width: torch would take it for one, a constant
    model = tiny_model("qwen2").train()
    layers, weight = model.config.num_hidden_layers, model.model.layers[0].self_attn.k_proj.weight

    def scored(packed, attention):
        model.zero_grad()
        logprob = score(model, [packed], attention=attention).logprob
        logprob.sum().backward()
        return logprob.detach(), weight.grad.clone()

    alone = [scored(packed, "cascade") for packed in packs]
    prepare_layers(model)
    made = []
    for packed, expected in zip(packs, alone, strict=True):
        before = joint_graphs.run
        torch.testing.assert_close(scored(packed, "cascade"), expected, rtol=1e-4, atol=1e-5)
        assert joint_graphs.run - before == layers
        made.append(joint_graphs.made)
    assert made[0] == made[-1]
    before = joint_graphs.run
    scored(packs[0], "dense")
    assert joint_graphs.run - before > layers  # any other kernel stays outside, and cuts the layer


def test_levels_stay_outside():
    """Every number of levels would be another graph."""
    packed = compile_calls(mem1_calls(3))
    paths, levels = (CascadePlan(packed, torch.device("cpu"), layout) for layout in ("paths", "levels"))
    assert paths.traceable
    assert not levels.traceable


def test_a_copy_of_a_prepared_model_runs_its_own_weights(graphs):
    packed = compile_calls(mem1_calls(3))
    model = tiny_model("qwen2")
    prepare_layers(model)
    copied = deepcopy(model)
    with torch.no_grad():
        before = score(copied, [packed]).logprob
        for parameter in model.parameters():
            parameter.mul_(2)
        assert torch.equal(score(copied, [packed]).logprob, before)
        assert not torch.equal(score(model, [packed]).logprob, before)
    assert graphs.run


def test_without_a_compiler_a_warning_says_so(monkeypatch, caplog):
    def refuse(function):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_module, "compiled", refuse)
    with caplog.at_level("WARNING"):
        assert not can_compile.__wrapped__(torch.device("cpu"))
    assert "no compiler here" in caplog.text
