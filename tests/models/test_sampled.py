"""The model that an engine samples from with LoRA: what it computes, what it shares, how many operators it runs."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from memopd.models.adapters import activate, adapter_weights, add_adapter, new_config
from memopd.models.sampled import BesideLinear, SamplingCopy
from memopd.verify.families import tiny_model

IDS = torch.arange(3, 11)[None]
VIEWS = ("view", "_unsafe_view", "t", "transpose", "unsqueeze", "slice", "expand", "detach", "select", "alias")


def adapted(dtype=torch.float32, model=None):
    """A model with two random adapters; the second adapts fewer layers and is the one that was active last."""
    model = (tiny_model("qwen2", 0) if model is None else model).to(dtype).eval()
    targets = ("c_attn", "c_proj") if model.config.model_type == "gpt2" else ("all-linear",)
    add_adapter(model, new_config(4, 8, targets), "student", trainable=True)
    add_adapter(model, new_config(4, 8, targets[:1] if len(targets) > 1 else ("q_proj", "up_proj")), "critic", True)
    change(model, 0)
    return model


def change(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name in ("student", "critic"):
            for weight in adapter_weights(model, name).values():
                weight.normal_(std=0.1)


@torch.no_grad()
def logits(model, adapter: str | None = None):
    if adapter is not None:
        activate(model, adapter)
    return model(input_ids=IDS, use_cache=False).logits


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))


@pytest.mark.parametrize("adapter", ["student", "critic"])
@pytest.mark.parametrize("base", [None, gpt2])
def test_it_computes_the_adapter_as_of_the_last_refresh(adapter, base):
    """In float64, up to rounding; GPT-2 keeps its weights transposed."""
    model = adapted(torch.float64, base and base())
    copy = SamplingCopy(model, adapter)
    addresses = [p.data_ptr() for p in copy.model.parameters()]
    first = logits(copy.model)
    torch.testing.assert_close(first, logits(model, adapter), rtol=0, atol=1e-12)
    other = "critic" if adapter == "student" else "student"
    assert (first - logits(model, other)).abs().max() > 1e-3
    before = {name: p.clone() for name, p in model.named_parameters()}
    change(model, 1)
    assert torch.equal(logits(copy.model), first)
    copy.refresh()
    torch.testing.assert_close(logits(copy.model), logits(model, adapter), rtol=0, atol=1e-12)
    assert (logits(copy.model) - first).abs().max() > 1e-3
    assert [p.data_ptr() for p in copy.model.parameters()] == addresses
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if ".lora_" not in name)


def test_it_shares_every_weight_but_the_adapters():
    model = adapted()
    copy = SamplingCopy(model, "student")
    mine = {p.data_ptr(): p.nbytes for p in model.parameters()}
    new = sum(p.nbytes for p in copy.model.parameters() if p.data_ptr() not in mine)
    assert new == sum(w.nbytes for w in adapter_weights(model, "student").values())
    assert copy.model.config is not model.config  # each has its own attention setting
    assert not any(hasattr(m, "base_layer") for m in copy.model.modules())


def test_in_half_precision_it_casts_the_adapter_as_the_trained_layers_do():
    model = adapted(torch.bfloat16)
    with torch.no_grad():
        for weight in adapter_weights(model, "student").values():
            weight.mul_(0.03)
    copy = SamplingCopy(model, "student").model
    used = [w for layer in copy.modules() if isinstance(layer, BesideLinear) for w in (layer.down, layer.up)]
    weights = list(adapter_weights(model, "student").values())
    assert len(used) == len(weights) >= 28
    for cast, weight in zip(used, weights, strict=True):
        assert weight.dtype == torch.float32
        assert torch.equal(cast, weight.bfloat16())


class Operators(TorchDispatchMode):
    """Counts operators, except for views, which launch no kernel."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count[function.__name__.partition(".")[0]] += 1
        return function(*arguments, **(named or {}))

    @property
    def kernels(self) -> int:
        return sum(n for name, n in self.count.items() if name not in VIEWS)


def kernels(model) -> int:
    with Operators() as operators:
        logits(model)
    return operators.kernels


def test_a_step_launches_fewer_kernels():
    """Per adapted layer: six more than the base with PEFT's layers, two here."""
    bare = kernels(tiny_model("qwen2", 0).bfloat16().eval())
    model = adapted(torch.bfloat16)
    activate(model, "student")
    layers = sum(hasattr(m, "base_layer") for m in model.modules())
    assert layers >= 14
    assert kernels(model) == bare + 6 * layers
    assert kernels(SamplingCopy(model, "student").model) == bare + 2 * layers
