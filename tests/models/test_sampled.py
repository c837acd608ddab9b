"""The model that an engine samples from on a GPU: what it computes, what it shares, how many operators it runs."""

from collections import Counter
from functools import cache

import pytest
import torch
import transformers
from calls import mem1_calls
from torch.utils._python_dispatch import TorchDispatchMode

from memopd.compile import compile_calls
from memopd.models import compiled as compiled_module
from memopd.models import sampled
from memopd.models.adapters import activate, adapter_weights, add_adapter, new_config
from memopd.models.compiled import prepare_layers
from memopd.models.sampled import ALIGNED, BesideLinear, SamplingCopy
from memopd.score import score
from memopd.verify.families import tiny_model

IDS = torch.arange(3, 11)[None]
VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "unsqueeze",
    "slice",
    "expand",
    "detach",
    "select",
    "alias",
    "split_with_sizes",
)


def adapted(dtype=torch.float32, model=None):
    """A model with two random adapters; the second adapts fewer layers and is the one that was active last."""
    model = (tiny_model("qwen2", 0) if model is None else model).to(dtype).eval()
    targets = ("c_attn", "c_proj") if model.config.model_type == "gpt2" else ("all-linear",)
    add_adapter(model, new_config(4, 8, targets), "student", trainable=True)
    add_adapter(model, new_config(4, 8, targets[:1] if len(targets) > 1 else ("q_proj", "up_proj")), "critic", True)
    change(model, 0)
    return model


def change(model, seed: int, names=("student", "critic")) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name in names:
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
    new = {id(p) for p in copy.model.parameters() if p.data_ptr() not in mine}
    besides = [m for m in copy.model.modules() if isinstance(m, BesideLinear)]
    assert new == {id(m.up) for m in besides}
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {m.whole.weight.untyped_storage().data_ptr() for m in besides} <= held  # A lies behind the base's rows
    assert copy.model.config is not model.config  # each has its own attention setting
    assert not any(hasattr(m, "base_layer") for m in copy.model.modules())


def test_in_half_precision_it_casts_the_adapter_as_the_trained_layers_do():
    model = adapted(torch.bfloat16)
    with torch.no_grad():
        for weight in adapter_weights(model, "student").values():
            weight.mul_(0.03)
    copy = SamplingCopy(model, "student").model
    used = [part for layer in copy.modules() if isinstance(layer, BesideLinear) for part in layer.parts]
    weights = list(adapter_weights(model, "student").values())
    assert len(used) == len(weights) >= 28
    casts = {tuple(weight.bfloat16().flatten().tolist()) for weight in weights}
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert {tuple(part.flatten().tolist()) for part in used} == casts


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


def test_a_step_launches_fewer_kernels(monkeypatch):
    """Seven linear layers of every layer are four products. PEFT adds six kernels to each of the seven, this one to
    each of the four."""
    monkeypatch.setattr(sampled, "beside", sampled.beside._init_fn)  # so that the operators in it are counted
    base = tiny_model("qwen2", 0).bfloat16().eval()
    bare, layers = kernels(base), base.config.num_hidden_layers
    assert kernels(SamplingCopy(base).model) == bare - 3 * layers
    model = adapted(torch.bfloat16)
    activate(model, "student")
    assert kernels(model) == bare + 6 * 7 * layers
    assert kernels(SamplingCopy(model, "student").model) == bare + (1 * 4 - 3) * layers


def test_without_an_adapter_it_computes_the_weights_of_the_moment():
    model = tiny_model("qwen2", 0).double().eval()
    first = logits(model)
    copy = SamplingCopy(model)
    torch.testing.assert_close(logits(copy.model), first, rtol=0, atol=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(logits(copy.model), logits(model), rtol=0, atol=1e-12)
    assert (logits(copy.model) - first).abs().max() > 1e-3
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in copy.model.parameters()} <= mine


def test_weights_that_lie_side_by_side_are_saved_and_trained_as_before(tmp_path):
    model, copied = tiny_model("qwen2", 0), tiny_model("qwen2", 0)
    SamplingCopy(model)
    for trained in (model, copied):
        optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        trained(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_layers_that_get_other_rows_compute_their_own_product():
    model = tiny_model("qwen2", 0).double()
    attention = model.model.layers[0].self_attn
    copied = SamplingCopy(model).model.model.layers[0].self_attn
    x, y = torch.randn(2, 1, 3, attention.q_proj.in_features, dtype=torch.float64)
    for name, rows in (("q_proj", x), ("k_proj", y), ("v_proj", x), ("v_proj", y), ("q_proj", y)):
        expected = getattr(attention, name)(rows)
        torch.testing.assert_close(getattr(copied, name)(rows), expected, rtol=0, atol=1e-12)


def test_compiled_layers_use_one_product_for_a_group(monkeypatch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        compiled_module, "compiled", cache(lambda function: torch.compile(function, dynamic=True, backend=backend))
    )
    model = adapted(torch.float64)
    copy = SamplingCopy(model, "student").model
    prepare_layers(copy)
    packed = compile_calls(mem1_calls(3))
    activate(model, "student")
    with torch.no_grad():
        expected, found = score(model, [packed]).logprob, score(copy, [packed]).logprob
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    products = [n for g in graphs for n in g.graph.nodes if n.op == "call_function" and "beside" in str(n.target)]
    assert len(products) == 4  # four groups, each with its base and its adapters


@pytest.mark.parametrize("rank", [3, 8])
def test_results_of_an_adapter_start_at_aligned_addresses(rank):
    model = tiny_model("qwen2", 0).double().eval()
    add_adapter(model, new_config(rank, 8, ("all-linear",)), "student", trainable=True)
    change(model, 0, ("student",))
    copy = SamplingCopy(model, "student").model
    besides = [m for m in copy.modules() if isinstance(m, BesideLinear)]
    assert len(besides) == 4 * model.config.num_hidden_layers
    assert {m.up.shape[1] % ALIGNED for m in besides} == {0}
    torch.testing.assert_close(logits(copy), logits(model, "student"), rtol=0, atol=1e-12)
