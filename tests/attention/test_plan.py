"""Which kernel computes a pack, and a user's own among them."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calls import mem1_calls

from benchmarks.attention import thin_trie, trie_of
from memopd.attention import KERNELS, check_attention, make_plan, plan
from memopd.attention.dense import KEPT, DensePlan, visible
from memopd.compile import compile_calls
from memopd.score import score
from memopd.types import Call
from memopd.verify import equivalence
from memopd.verify.families import tiny_model


@pytest.fixture
def packed():
    return compile_calls(mem1_calls(0))


# ---- by name ------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module that a user wrote."""
    (tmp_path / "some_kernels.py").write_text(
        "from memopd.attention.dense import DensePlan\n\n"
        "class Mine(DensePlan):\n"
        "    def __init__(self, packed, device, windowed, config, bias=0.0):\n"
        "        super().__init__(packed, device)\n"
        "        self.asked = windowed, config.hidden_size, bias\n\n"
        "class Greedy(DensePlan):\n"
        "    def __init__(self, packed, device, memory):\n"
        "        super().__init__(packed, device)\n\n"
        "class Blind:\n    pass\n\nNUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_class_of_your_own_gets_what_it_asks_for(own, packed):
    made = make_plan(packed, "some_kernels:Mine", tiny_model("llama"))
    assert made.asked == (False, 64, 0.0)
    check_attention("some_kernels:Mine")
    assert equivalence(tiny_model("llama"), mem1_calls(0), "some_kernels:Mine").passed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dnse", "'dnse' is not one of auto, dense, cascade, flex; write module:name for your own"),
        ("some_kernels:Other", "module 'some_kernels' has no 'Other'"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("some_kernels:NUMBER", "must be a class with attend, got int"),
        ("some_kernels:Blind", "must be a class with attend; it has no attend"),
        ("some_kernels:Greedy", "needs memory; available: packed, device, dtype, config, windowed"),
    ],
)
def test_a_wrong_name_is_one_line_without_a_model(own, packed, name, message):
    for refused in (lambda: check_attention(name), lambda: make_plan(packed, name, tiny_model("llama"))):
        with pytest.raises(ValueError, match=r"model\.attention: ") as why:
            refused()
        assert message in str(why.value)
        assert "\n" not in str(why.value)


@pytest.mark.parametrize("name", ["auto", *KERNELS])
def test_ours_have_names(name):
    check_attention(name)


def test_a_plan_stays_with_its_pack(packed):
    """For every model that it suits, but not for other rows."""
    llama, qwen = tiny_model("llama"), tiny_model("qwen2")
    for name in ("dense", "cascade"):
        first = make_plan(packed, name, llama)
        assert make_plan(packed, name, qwen) is first
        assert make_plan(replace(packed, decisions=packed.decisions), name, llama) is first
        assert make_plan(replace(packed, positions=packed.positions + 1), name, llama) is not first
        assert make_plan(replace(packed, exit=packed.exit.copy()), name, llama) is not first
        assert make_plan(packed, name, llama) is first
    assert make_plan(packed, "dense", llama) is not make_plan(packed, "cascade", llama)


def test_a_plan_of_your_own_stays_if_it_says_so(own, packed):
    """It asks for the model's settings here, so that every model has its own. A large mask does not stay."""
    llama, qwen = tiny_model("llama"), tiny_model("qwen2")
    first = make_plan(packed, "some_kernels:Mine", llama)
    assert make_plan(packed, "some_kernels:Mine", llama) is first
    assert make_plan(packed, "some_kernels:Mine", qwen) is not first
    long = compile_calls([Call(np.arange(KEPT + 1), [1])])
    assert make_plan(long, "dense", llama) is not make_plan(long, "dense", llama)


def test_a_plan_of_a_pass_without_gradients_serves_one_with(packed):
    model = tiny_model("qwen2")
    for name in ("dense", "cascade"):
        with torch.inference_mode():
            without = score(model, [packed], attention=name).logprob.clone()
        logprob = score(model, [packed], attention=name).logprob
        logprob.sum().backward()
        assert torch.equal(logprob, without)


# ---- which kernel -------------------------------------------------------------------------------------------


def config_of(**more) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 64, "num_attention_heads": 4, **more})


@pytest.mark.parametrize(
    ("config", "device", "dtype", "rows", "kernel"),
    [
        ({}, "cpu", torch.float32, 100, "dense"),
        ({}, "cpu", torch.float32, 5000, "cascade"),
        ({"attn_logit_softcapping": 50.0}, "cpu", torch.float32, 5000, "dense"),
        ({}, "mps", torch.float32, 5000, "dense"),
        ({"qk_head_dim": 24, "v_head_dim": 16}, "cuda", torch.bfloat16, 5000, "dense"),
        ({}, "cuda", torch.bfloat16, 100, "cascade"),
        ({}, "cuda", torch.float64, 100, "dense"),
        ({"attn_logit_softcapping": 50.0}, "cuda", torch.bfloat16, 100, "flex"),
        ({"head_dim": 20}, "cuda", torch.bfloat16, 100, "flex"),
        ({"head_dim": 512}, "cuda", torch.bfloat16, 100, "flex"),
        ({"sliding_window": 8}, "cuda", torch.float32, 100, "flex"),
        ({"sliding_window": 8, "use_sliding_window": False}, "cuda", torch.float32, 100, "cascade"),
        ({"layer_types": ["sliding_attention"]}, "cuda", torch.float32, 100, "flex"),
    ],
)
def test_auto_chooses_by_model_device_precision_and_rows(config, device, dtype, rows, kernel):
    pack = compile_calls([Call(np.arange(rows), [0])])
    chosen, why = plan.choose_attention(config_of(**config), device, dtype, pack)
    assert chosen == kernel
    assert chosen in KERNELS
    assert why


@pytest.mark.parametrize(
    ("packed", "kernel"),
    [
        (thin_trie(4096, 8), "cascade"),
        (thin_trie(4096, 64), "flex"),
        (thin_trie(16384, 64), "flex"),
        (trie_of(16384, 4, 64), "cascade"),
        (trie_of(65536, 2, 64), "cascade"),
    ],
    ids=["few calls", "thin", "thin and large", "balanced", "balanced and large"],
)
def test_auto_leaves_thin_tries_to_the_kernel_that_is_faster_there(packed, kernel):
    """As measured on an H200: benchmarks/results/attention-thin-h200.jsonl."""
    assert plan.choose_attention(config_of(), "cuda", torch.bfloat16, packed)[0] == kernel


def test_auto_logs_once_what_it_chose(packed, caplog, monkeypatch):
    monkeypatch.setattr(plan, "_logged", set())
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO, "memopd"):
        assert isinstance(make_plan(packed, "auto", model), DensePlan)
        make_plan(packed, "auto", model)
    assert [r.message for r in caplog.records] == ["attention: auto takes the kernel dense (under 512 rows on a CPU)"]


# ---- the dense plan by hand ---------------------------------------------------------------------------------


def test_visibility_of_the_example():
    """Row 3 (id 9) sees rows 0, 1, 3: its own call and nothing else."""
    mask = visible(torch.tensor([4, 4, 3, 4]))
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_a_window_counts_positions_on_the_path_not_rows():
    packed = compile_calls([Call([7, 8], [1, 2]), Call([7, 8, 9], [3])])
    dense = DensePlan(packed, torch.device("cpu"))
    assert dense.within(2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert dense.within(None) is dense.mask
    assert dense.within(3) is dense.mask  # as long as the longest call
