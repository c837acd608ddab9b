"""Configurations: every shipped one loads, few knobs, and one line for what is wrong with one."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from memopd.config import SECTIONS, RunConfig, check, from_tables, load_config

SHIPPED = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.toml"))


def test_there_are_shipped_ones():
    assert {p.name for p in SHIPPED} == {"quickstart.toml", "world.toml", "world-gpu.toml", "paper-3b.toml"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_one_loads(path):
    config = load_config(path)
    assert config != RunConfig()
    assert from_tables(json.loads(config.as_json()), "again") == config  # resolved JSON reads back


def test_few_knobs():
    assert sum(len(dataclasses.fields(section())) for section in SECTIONS.values()) <= 64


def test_the_paper_settings():
    """Written here a second time by hand."""
    c = load_config(next(p for p in SHIPPED if p.name == "paper-3b.toml"))
    o = c.optimise
    assert (o.lr, o.warmup, o.critic_lr, o.critic_warmup) == (1e-6, 0.05, 1e-5, 0.015)
    assert (o.reference, o.gamma, o.gae_lambda, o.clip, o.value_clip, o.entropy) == (0.001, 1.0, 1.0, 0.2, 0.5, 0.001)
    assert (o.epochs, o.tasks * o.samples, o.mini_batch, o.steps) == (1, 128, 64, 500)
    assert (c.tasks.max_context, c.sampling.max_tokens, c.sampling.temperature) == (4096, 1000, 1.0)
    assert (c.teacher.state, c.teacher.weight, c.teacher.mask) == ("aligned", 0.02, "all")
    assert c.sft.start == "Qwen/Qwen2.5-3B"
    assert c.model.teacher.startswith("Qwen/Qwen2.5-7B")


@pytest.mark.parametrize(("name", "millions"), [("student", 3), ("teacher", 10)])
def test_shapes_of_the_world(name, millions):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memopd.world.tokenizer import END, PAD, SPECIAL, train_tokenizer

    shape = json.loads(SHIPPED[0].with_name("models").joinpath(f"{name}.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert shape["vocab_size"] == inspect.signature(train_tokenizer).parameters["size"].default
    assert (shape["eos_token_id"], shape["pad_token_id"]) == (SPECIAL.index(END), SPECIAL.index(PAD))
    assert shape["tie_word_embeddings"]
    assert shape["hidden_size"] // shape["num_attention_heads"] == 32


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_types_and_overrides(tmp_path):
    path = write(tmp_path, '[optimise]\nlr = 1\nsteps = 3\n[sft]\nepisodes = "one"\n[sampling]\nservers = ["a", "b"]\n')
    config = load_config(path, {"optimise.lr": "2e-5", "optimise.whiten": "False", "sft.keep": "valid"})
    assert config.optimise.lr == 2e-5
    assert config.optimise.steps == 3
    assert config.optimise.whiten is False
    assert config.sft.episodes == ("one",)
    assert config.sft.keep == ("valid",)
    assert config.sampling.servers == ("a", "b")
    assert load_config(path).optimise.lr == 1.0


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("[optimise\n", {}, "not TOML"),
        ("lr = 1\n", {}, r"unknown section \[lr\]: choose from model, tasks"),
        ("[optimize]\n", {}, r"unknown section \[optimize\]"),
        ("[optimise]\nrate = 1\n", {}, "optimise.rate: no such setting; there are steps, tasks"),
        ('[optimise]\nlr = "1"\n', {}, "optimise.lr: must be a number, got '1'"),
        ("[optimise]\nsteps = 1.5\n", {}, "optimise.steps: must be a whole number, got 1.5"),
        ("[optimise]\nwhiten = 1\n", {}, "optimise.whiten: must be true or false, got 1"),
        ("[sft]\nkeep = [1]\n", {}, "sft.keep: must be a list of text"),
        ("", {"optimise.whiten": "yes"}, "--optimise.whiten: must be true or false, got 'yes'"),
        ("", {"optimise.steps": "1e3"}, "--optimise.steps: must be a whole number, got '1e3'"),
        ("", {"sampler.batch": "1"}, "--sampler.batch: unknown section 'sampler'"),
        ("", {"model.dtype": "float16"}, "model.dtype: 'float16' is not one of float32, bfloat16, float64"),
        ("", {"optimise.lr": "nan"}, "optimise.lr: must be a finite number"),
        ("", {"optimise.lr": "-1"}, "optimise.lr: must not be negative"),
        ("", {"optimise.gamma": "1.5"}, "optimise.gamma: is a share, at most 1"),
        ("", {"run.keep": "0"}, "run.keep: must be above 0"),
        ("", {"run.save_every": "0"}, "run.save_every: must be above 0"),
        ("", {"sampling.temperature": "0"}, "sampling.temperature: must be above 0"),
        ("", {"optimise.algorithm": "grpo"}, "optimise.samples must be 2 or more"),
    ],
)
def test_one_line_for_what_is_wrong(tmp_path, text, overrides, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_config(write(tmp_path, text), overrides)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nosuch\.toml: no such file; configs/ has examples"):
        load_config(tmp_path / "nosuch.toml")


def test_the_defaults_are_sound():
    check(RunConfig())


def test_no_torch():
    code = "import sys, memopd.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
