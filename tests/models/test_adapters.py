"""Adapters in PEFT's format: what they compute, several over one base, and one line where one does not fit."""

import json
import logging
import shutil
from functools import partial

import pytest
import torch
from calls import mixed_calls
from peft import LoraConfig, PeftModel, get_peft_model
from random_adapter import add_random, write_base, write_random
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memopd.models.adapters import (
    activate,
    adapter_weights,
    add_adapter,
    base_digest,
    check_adapter,
    load_adapter,
    new_config,
    same_base,
)
from memopd.models.load import load_causal_lm
from memopd.verify import equivalence
from memopd.verify.equivalence import gradient_equivalence
from memopd.verify.families import FAMILIES, tiny_model

IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """base/ and other/, two models of one shape; start/, a random adapter of base/."""
    folder = tmp_path_factory.mktemp("adapters")
    write_base(folder / "base", 0)
    write_base(folder / "other", 1)
    write_random(folder / "start", folder / "base")
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    """The adapter, to be damaged."""
    shutil.copytree(folder / "start", tmp_path / "adapter")
    return tmp_path / "adapter"


def load(path, dtype=torch.float32):
    return load_causal_lm(str(path), dtype)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


# ---- what an adapter computes -----------------------------------------------------------------------------------


def test_peft_computes_the_same_from_the_folder(folder):
    ours, bare = load(folder / "base"), logits(load(folder / "base"))
    load_adapter(ours, str(folder / "start"))
    theirs = PeftModel.from_pretrained(load(folder / "base"), str(folder / "start"))
    assert torch.equal(logits(ours), logits(theirs))
    assert (logits(ours) - bare).abs().max() > 1  # random weights: the adapter matters


def test_an_adapter_that_peft_made_is_loaded_and_its_base_cannot_be_verified(folder, tmp_path, caplog):
    """With all that changes nothing but sizes and scales: patterns, another scaling, dropout in training."""
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"down_proj": 2},
        alpha_pattern={"q_proj": 3},
        lora_dropout=0.1,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(load(folder / "base"), config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "made")
    with caplog.at_level(logging.INFO, "memopd"):
        info = check_adapter(str(tmp_path / "made"), str(folder / "base"))
    assert not info.verified
    assert "does not name its base's weights" in caplog.text
    ours = load(folder / "base")
    load_adapter(ours, str(tmp_path / "made"))
    assert torch.equal(logits(ours.train()), logits(theirs.eval()))  # dropout is off, in training too


def test_a_new_adapter_changes_nothing(folder):
    model = load(folder / "base")
    bare = logits(model)
    add_adapter(model, new_config(4, 8, ("all-linear",)), "student", trainable=True)
    assert torch.equal(logits(model), bare)


def test_a_base_in_half_precision_keeps_it_and_the_adapter_is_precise(folder):
    """Products are those of weights rounded to bfloat16, as FSDP's mixed precision computes them."""
    model, rounded = load(folder / "base", torch.bfloat16), load(folder / "base", torch.bfloat16)
    for m in (model, rounded):
        load_adapter(m, str(folder / "start"), trainable=True)
    precise = {name: weight.clone() for name, weight in adapter_weights(model, "student").items()}
    with torch.no_grad():
        for weight in adapter_weights(rounded, "student").values():
            weight.copy_(weight.bfloat16())
    assert {w.dtype for w in precise.values()} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if n not in precise} == {torch.bfloat16}
    assert any(not torch.equal(w, w.bfloat16().float()) for w in precise.values())
    assert torch.equal(logits(model), logits(rounded))
    assert logits(model).dtype == torch.bfloat16
    model(input_ids=IDS).logits.float().logsumexp(-1).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == precise.keys()
    assert {g.dtype for g in grads.values()} == {torch.float32}


def test_several_over_one_base(folder):
    """Each computes as if it were alone; activating one freezes and unfreezes none."""
    model, alone = load(folder / "base"), {}
    for seed, name in enumerate(("student", "critic")):
        add_random(model, name, seed, ("q_proj", "v_proj") if seed else ("all-linear",))
        alone[name] = logits(
            add_random(load(folder / "base"), "student", seed, ("q_proj", "v_proj") if seed else ("all-linear",))
        )
    add_adapter(model, new_config(2, 2, ("o_proj",)), "reference", trainable=False)
    trained = {n: p.requires_grad for n, p in model.named_parameters()}
    for name in ("student", "critic", None, "student"):
        activate(model, name)
        assert torch.equal(logits(model), alone[name] if name else logits(load(folder / "base")))
        assert {n: p.requires_grad for n, p in model.named_parameters()} == trained
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n in trained if ".reference." in n or "lora" not in n}


@pytest.mark.parametrize("family", [f for f in FAMILIES if "longrope" not in f])
def test_packed_is_independent_in_every_family(family):
    """In float64, logits and the gradient of every adapter weight; the base has none."""
    targets = ("in_proj",) if "mamba" in family else ("all-linear",)  # PEFT refuses Mamba's other layers
    model = add_random(tiny_model(family, dtype=torch.float64), targets=targets)
    assert equivalence(model, mixed_calls(0)).passed
    assert gradient_equivalence(model, mixed_calls(0)).passed
    model(input_ids=IDS).logits.sum().backward()
    got = {n for n, p in model.named_parameters() if p.grad is not None}
    assert got == adapter_weights(model, "student").keys()


# ---- which adapter fits which base ------------------------------------------------------------------------------


def test_an_adapter_of_this_base(folder):
    info = check_adapter(str(folder / "start"), str(folder / "base"))
    assert (info.rank, info.alpha, info.verified) == (4, 8, True)
    assert len(info.layers) == 3 * 7
    shutil.copytree(folder / "base", folder / "moved", dirs_exist_ok=True)
    assert check_adapter(str(folder / "start"), str(folder / "moved")).verified


def settings(change, folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def write(name, content, folder):
    (folder / name).write_bytes(content)


def weights(change, folder):
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def without_one(tensors):
    return dict(list(tensors.items())[1:])


def card(change, folder):
    file = folder / "memopd.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), r"there is no adapter here \(no adapter_config.json\)"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), r"there are no weights here \(no adapter_model"),
        (partial(write, "adapter_config.json", b"[1]"), "adapter_config.json: must be a JSON object"),
        (partial(write, "adapter_config.json", b"{"), "adapter_config.json: not a line of JSON"),
        (partial(write, "memopd.json", b"{}"), "memopd.json: not a card of an adapter"),
        (partial(write, "adapter_model.safetensors", b"12345678"), "adapter_model.safetensors: cut short or damaged"),
        (partial(settings, {"peft_type": "IA3"}), "peft_type is 'IA3': only LORA adapters are supported"),
        (partial(settings, {"use_dora": True}), "uses use_dora = True, which is not supported"),
        (partial(settings, {"modules_to_save": ["lm_head"]}), "uses modules_to_save"),
        (partial(settings, {"bias": "all"}), "uses bias = 'all'"),
        (partial(settings, {"init_lora_weights": "pissa"}), "uses init_lora_weights = 'pissa'"),
        (partial(settings, {"of_the_future": 1}), "uses of_the_future = 1"),
        (partial(settings, {"r": 8}), r"has shape \[4, \d+\], and rank 8 on .*base needs \[8, \d+\]"),
        (partial(settings, {"r": "4"}), "r must be a number above 0, got '4'"),
        (partial(settings, {"target_modules": ["q_proj"]}), r"adapts base_model\.model\.model\.layers\.0\.mlp"),
        (partial(settings, {"target_modules": [1]}), r"target_modules must name the layers, got \[1\]"),
        (partial(settings, {"target_modules": "("}), "adapter: "),
        (partial(settings, {"target_modules": ["q_proj", "lm_head"]}), "lm_head cannot be adapted"),
        (partial(settings, {"target_modules": r".*(q_proj|lm_head)"}), "neither the vocabulary head nor the embedding"),
        (partial(weights, without_one), r"lacks base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A"),
        (partial(card, {"base_digest": "0" * 64}), "was trained on other weights than those of"),
        (partial(card, {"tokenizer_digest": "0" * 64}), "was trained with another tokenizer than that of"),
    ],
)
def test_what_does_not_fit_is_one_line(damage, line, folder, copy):
    (copy / "digests.json").unlink()
    check_adapter(str(copy), str(folder / "base"))
    damage(copy)
    with pytest.raises(ValueError, match=line) as error:
        check_adapter(str(copy), str(folder / "base"))
    assert "\n" not in str(error.value)
    assert str(copy) in str(error.value)


def test_a_flipped_bit_is_noticed(folder, copy):
    file = copy / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for use in (check_adapter, lambda f, base: load_adapter(load(base), f)):
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors: damaged"):
            use(str(copy), str(folder / "base"))


def test_another_base(folder, copy, tmp_path):
    """Of the same shape but with other weights; of another shape; and no base at all."""
    with pytest.raises(ValueError, match=r"was trained on other weights than those of .*other .*name that base"):
        check_adapter(str(copy), str(folder / "other"))
    (copy / "memopd.json").unlink()
    (copy / "digests.json").unlink()
    assert not check_adapter(str(copy), str(folder / "other")).verified
    config = FAMILIES["qwen2"]()
    config.hidden_size = 32
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="it is of another base or rank"):
        check_adapter(str(copy), str(tmp_path / "narrow"))
    with pytest.raises(ValueError, match="does not fit this model"):
        load_adapter(load(tmp_path / "narrow"), str(copy))
    with pytest.raises(ValueError, match="there is no model here"):
        check_adapter(str(copy), str(tmp_path / "nothing"))


def test_the_run_of_an_adapter_is_not_the_adapter(folder, tmp_path):
    shutil.copytree(folder / "start", tmp_path / "run" / "adapter")
    with pytest.raises(ValueError, match=rf"run: there is no adapter here .*: give {tmp_path}/run/adapter$"):
        check_adapter(str(tmp_path / "run"), str(folder / "base"))


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}])
def test_another_base_of_other_shapes_is_named_by_the_card(change, folder, tmp_path):
    config = FAMILIES["qwen2"]()
    for name, value in change.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wrong")
    with pytest.raises(ValueError, match=rf"was trained on other weights than those of .*wrong \(on {folder}/base, "):
        check_adapter(str(folder / "start"), str(tmp_path / "wrong"))
    AutoModelForCausalLM.from_config(FAMILIES["bloom (own attention)"]()).save_pretrained(tmp_path / "stranger")
    with pytest.raises(ValueError, match=r"was trained on other weights than those of .*stranger "):
        check_adapter(str(folder / "start"), str(tmp_path / "stranger"))


def test_weights_are_read_once_the_shapes_fit(folder, copy, tmp_path, monkeypatch):
    """A digest of large weights takes minutes."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("memopd.models.adapters.base_digest", lambda path: pytest.fail("read the weights"))
    with pytest.raises(ValueError, match="there is no model here"):
        check_adapter(str(copy), str(tmp_path / "empty"))
    for file in ("memopd.json", "digests.json"):
        (copy / file).unlink()
    settings({"r": 8}, copy)
    with pytest.raises(ValueError, match="it is of another base or rank"):
        check_adapter(str(copy), str(folder / "base"))


@pytest.mark.parametrize(
    ("targets", "line"),
    [
        (("lm_head",), "lora.targets: lm_head cannot be adapted"),
        (("embed_tokens",), "lora.targets: model.embed_tokens cannot be adapted"),
        (("self_attn",), r"lora.targets: model.layers.0.self_attn cannot be adapted: only linear layers"),
        (("q_proj", "nothing"), "lora.targets: Qwen2ForCausalLM has no layer 'nothing'"),
        ((), "lora.targets: name linear layers, or all-linear alone"),
        (("all-linear", "q_proj"), "lora.targets: name linear layers, or all-linear alone"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, line):
    with pytest.raises(ValueError, match=line):
        add_adapter(tiny_model("qwen2"), new_config(4, 8, targets), "student", trainable=True)


def test_the_digest_of_a_base_is_that_of_its_weights(folder, tmp_path):
    digest = base_digest(str(folder / "base"))
    load(folder / "base").save_pretrained(tmp_path / "split", max_shard_size="50KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    assert base_digest(str(tmp_path / "split")) == digest  # however they are spread over files
    assert base_digest(str(folder / "other")) != digest
    file = next((tmp_path / "split").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert base_digest(str(tmp_path / "split")) != digest  # although the path was asked for before
    with pytest.raises(ValueError, match=r"there are no weights in it"):
        base_digest(str(tmp_path))


def test_the_same_base_has_the_same_weights_and_settings(folder, tmp_path):
    assert same_base(str(folder / "base"), str(folder / "base" / ".." / "base"))
    assert not same_base(str(folder / "base"), str(folder / "other"))
    shutil.copytree(folder / "base", tmp_path / "copy")
    assert same_base(str(folder / "base"), str(tmp_path / "copy"))
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert not same_base(str(folder / "base"), str(tmp_path / "copy"))


def test_the_folder_is_replaced_whole(folder, tmp_path):
    write_random(tmp_path / "adapter", folder / "base")
    (tmp_path / "adapter" / "old.txt").write_text("")
    write_random(tmp_path / "adapter", folder / "base", seed=1)
    names = sorted(f.name for f in (tmp_path / "adapter").iterdir())
    assert "old.txt" not in names
    assert {"adapter_config.json", "adapter_model.safetensors", "memopd.json", "tokenizer.json"} <= set(names)
