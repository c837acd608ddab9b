"""Configurations: every shipped one loads, few knobs, and one line for what is wrong with one."""

import dataclasses
import functools
import inspect
import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memopd.cli.config import check, overrides
from memopd.cli.options import Protocol
from memopd.config import (
    EVALUATED,
    PROTOCOLS,
    SECTIONS,
    OptimiseConfig,
    RunConfig,
    from_tables,
    json_schema,
    load_config,
)
from memopd.types import Sampling

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(ROOT.joinpath("configs").glob("*.toml"))
TRAINING = ROOT / "paper" / "world" / "training.toml"
REAL = [ROOT / "paper" / "real" / f"{name}.toml" for name in ("training", "sft-student", "sft-teacher")]


def test_there_are_shipped_ones():
    named = {
        "quickstart.toml",
        "world.toml",
        "world-gpu.toml",
        "paper-3b.toml",
        "qwen-0.5b-lora.toml",
        "your-questions.toml",
    }
    assert {p.name for p in SHIPPED} == named


@pytest.mark.parametrize("path", [*SHIPPED, TRAINING, *REAL], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_shipped_one_loads(path):
    config = load_config(path)
    assert config != RunConfig()
    assert from_tables(json.loads(config.as_json()), "again") == config  # resolved JSON reads back


def test_few_knobs():
    """A new setting should replace one, or be worth a line of every user's attention."""
    assert sum(len(dataclasses.fields(section())) for section in SECTIONS.values()) <= 75


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
        ("[optimise\n", {}, "c.toml: not TOML: "),
        ("lr = 1\n", {}, "c.toml: unknown section [lr]: choose from model, tasks"),
        ("[optimise]\nrate = 1\n", {}, "c.toml: optimise.rate: no such setting; choose from steps, tasks"),
        ('[optimise]\nlr = "1"\n', {}, 'c.toml: optimise.lr: must be a number, got "1"'),
        ("[optimise]\nlr = true\n", {}, "c.toml: optimise.lr: must be a number, got true"),
        ("[optimise]\nsteps = 1.5\n", {}, "c.toml: optimise.steps: must be a whole number, got 1.5"),
        ("[optimise]\nsteps = true\n", {}, "c.toml: optimise.steps: must be a whole number, got true"),
        ("[optimise]\nwhiten = 1\n", {}, "c.toml: optimise.whiten: must be true or false, got 1"),
        ("[model]\nstudent = 1\n", {}, "c.toml: model.student: must be a string, got 1"),
        ("[sft]\nkeep = [1]\n", {}, "c.toml: sft.keep: must be a list of strings, got 1 in it"),
        ("[sft]\nkeep = 1\n", {}, "c.toml: sft.keep: must be a list, got 1"),
        ("[sampling]\nbatch = 0\n", {}, "c.toml: sampling.batch: must be above 0, got 0"),
        ("", {"optimise.whiten": "yes"}, '--optimise.whiten: must be true or false, got "yes"'),
        ("", {"optimise.steps": "1e3"}, '--optimise.steps: must be a whole number, got "1e3"'),
        ("", {"optimise.rate": "1"}, "--optimise.rate: no such setting; choose from steps, tasks"),
        ("[optimise]\nstep = 1\n", {}, "c.toml: optimise.step: no such setting; did you mean optimise.steps?"),
        ("[optimise]\nseed = 1\n", {}, "c.toml: optimise.seed: no such setting; did you mean run.seed?"),
        ("[optimize]\nlr = 1\n", {}, "c.toml: unknown section [optimize]: did you mean [optimise]?"),
        ("", {"optimise.mini_bach": "1"}, "--optimise.mini_bach: no such setting; did you mean --optimise.mini_batch?"),
        ("", {"sample.batch": "4"}, "--sample.batch: unknown section 'sample': did you mean --sampling.batch?"),
        ("", {"x.batch": "4"}, "--x.batch: unknown section 'x': did you mean --sampling.batch or --sft.batch?"),
        ("", {"x.y": "4"}, "--x.y: unknown section 'x': choose from model, tasks"),
        ("", {"model.dtype": "float16"}, '--model.dtype: "float16" is not one of float32, bfloat16, float64'),
        ("", {"optimise.lr": "nan"}, "--optimise.lr: must be a finite number, got NaN"),
        ("", {"optimise.lr": "-1"}, "--optimise.lr: must be 0 or more, got -1.0"),
        ("", {"optimise.gamma": "1.5"}, "--optimise.gamma: must be at most 1, got 1.5"),
        ("", {"run.keep": "0"}, "--run.keep: must be above 0, got 0"),
        ("", {"run.save_every": "0"}, "--run.save_every: must be above 0"),
        ("", {"sampling.temperature": "0"}, "--sampling.temperature: must be above 0"),
    ],
)
def test_one_line_for_what_is_wrong(tmp_path, text, overrides, complaint):
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(write(tmp_path, text), overrides)
    message = str(caught.value)
    assert complaint in message
    assert len(message.splitlines()) == 1
    assert "pydantic" not in message


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nosuch\.toml: no such file; configs/ has examples"):
        load_config(tmp_path / "nosuch.toml")


def test_the_defaults_are_sound():
    """Pydantic does not check defaults; here they take the way of given values."""
    assert from_tables(json.loads(RunConfig().as_json()), "defaults") == RunConfig()


def test_a_replaced_value_is_checked():
    assert dataclasses.replace(OptimiseConfig(), lr=1).lr == 1.0
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        dataclasses.replace(OptimiseConfig(), lr=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimiseConfig().lr = 1.0


def test_no_torch():
    code = "import sys, memopd.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Older configurations.


@pytest.mark.parametrize(("old", "new"), [("gae", "ppo"), ("group", "grpo")])
def test_an_old_name_is_carried_over(tmp_path, caplog, old, new):
    text = f'[optimise]\nsamples = 2\nadvantages = "{old}"\n'
    with caplog.at_level(logging.INFO, "memopd"):
        config = load_config(write(tmp_path, text))
    assert config.optimise.algorithm == new
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 'c.toml'}: optimise.advantages is now called optimise.algorithm")
    assert load_config(write(tmp_path, text.replace(old, "gae")), {"optimise.lr": "1"}).optimise.algorithm == "ppo"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('advantages = "gae"\nalgorithm = "ppo"', "is the old name of optimise.algorithm: remove advantages"),
        ('advantages = "td"', "optimise.advantages: 'td' is not one of gae, group; it is now optimise.algorithm"),
        ("advantages = [1]", "optimise.advantages: [1] is not one of gae, group"),
    ],
)
def test_an_old_name_that_cannot_be_carried_over(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=r".") as caught:
        load_config(write(tmp_path, f"[optimise]\n{text}\n"))
    assert complaint in str(caught.value)


def test_the_resolved_settings_of_an_older_version_are_read(caplog):
    """That version had no `clip_high`, `divergence` and `environment`, and called the algorithm advantages."""
    now = load_config(TRAINING)
    tables = json.loads(now.as_json())
    for section, added in (("optimise", "clip_high"), ("teacher", "divergence"), ("tasks", "environment")):
        del tables[section][added]
    assert tables["optimise"].pop("algorithm") == "grpo"
    tables["optimise"]["advantages"] = "group"
    with caplog.at_level(logging.INFO, "memopd"):
        assert from_tables(tables, "config.json") == now
    assert not caplog.messages  # nobody can change that file's line
    tables["optimise"]["advantages"] = "gae"
    assert from_tables(tables, "config.json") != now


# The command.


@pytest.mark.parametrize("wrong", ["optimise.algorithm", "teacher.divergence", "model.attention", "tasks.environment"])
def test_the_command_checks_the_names_of_parts(wrong):
    with pytest.raises(ValueError, match=rf"^{wrong}: 'nowhere:Part': No module named 'nowhere'"):
        check(load_config(TRAINING, {wrong: "nowhere:Part"}))
    with pytest.raises(ValueError, match=r"compares the episodes of a task: optimise\.samples must be 2 or more"):
        check(load_config(TRAINING, {"optimise.samples": "1"}))


@pytest.mark.parametrize("file", [*SHIPPED, TRAINING, *REAL], ids=lambda file: file.stem)
def test_the_shipped_configurations_pass_the_checks_of_the_command(file):
    check(load_config(file))


def memopd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memopd.cli", "config", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_the_resolved_configuration():
    shown = memopd(TRAINING, "--optimise.lr", "0.5", "--run.seed=7")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert from_tables(json.loads(shown.stdout), "stdout") == load_config(
        TRAINING, {"optimise.lr": "0.5", "run.seed": "7"}
    )


def test_a_protocol_sets_its_settings_and_an_option_wins():
    """MEM1's code: 6 turns, credit without the right count, its own normalisation. RUN/config.json has them by name."""
    tasks = load_config(TRAINING).tasks
    mem1 = dataclasses.replace(tasks, turns=6, reward="em_partial", grading="mem1")
    of = functools.partial(overrides, short={}, protocol="mem1")
    assert load_config(TRAINING, of([])).tasks == mem1
    assert load_config(TRAINING, of(["--tasks.turns", "9"])).tasks == dataclasses.replace(mem1, turns=9)
    assert load_config(TRAINING, overrides([])).tasks == tasks
    shown = memopd(TRAINING, "--tasks.reward=f1", "--protocol", "mem1")
    assert json.loads(shown.stdout)["tasks"] == dataclasses.asdict(dataclasses.replace(mem1, reward="f1"))


def test_every_setting_of_a_protocol_is_a_setting():
    for settings in PROTOCOLS.values():
        dataclasses.replace(RunConfig().tasks, **settings)
    for settings in EVALUATED.values():
        Sampling(**settings)
    assert PROTOCOLS.keys() == EVALUATED.keys() == set(Protocol)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give a CONFIG to check and print, or --schema alone"),
        ((TRAINING, "--schema"), "give a CONFIG to check and print, or --schema alone"),
        ((TRAINING, "--optimise.steps", "0"), "--optimise.steps: must be above 0, got 0"),
        ((TRAINING, "--steps", "3"), "'--steps': no such option; give settings as --section.field value"),
        ((TRAINING, "--sft.keep", "best"), "sft.keep: best: choose from correct, valid"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, complaint):
    shown = memopd(*arguments)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == f"memopd: {complaint}\n"


def test_the_command_prints_the_schema():
    shown = memopd("--schema")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout) == json_schema()


def settings_of(schema: dict) -> dict[str, dict]:
    """Each setting's part of the schema, by section.field."""
    sections = {name: schema["$defs"][part["$ref"].rpartition("/")[2]] for name, part in schema["properties"].items()}
    return {f"{name}.{field}": part for name, s in sections.items() for field, part in s["properties"].items()}


def test_the_schema_says_what_a_setting_is():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(schema["properties"]) == list(SECTIONS)
    assert all(part["additionalProperties"] is False for part in (schema, *schema["$defs"].values()))
    defaults = json.loads(RunConfig().as_json())
    settings = settings_of(schema)
    assert settings.keys() == {f"{section}.{name}" for section in defaults for name in defaults[section]}
    for name, part in settings.items():
        section, _, field = name.partition(".")
        assert part["default"] == defaults[section][field]
        assert part["description"]
    assert "needs a reward that is 0 for a wrong number of answers" in settings["sft.keep"]["description"]
    assert settings["model.dtype"]["enum"] == ["float32", "bfloat16", "float64"]
    gamma = settings["optimise.gamma"]
    assert (gamma["type"], gamma["minimum"], gamma["maximum"]) == ("number", 0, 1)
    assert (settings["optimise.steps"]["type"], settings["optimise.steps"]["exclusiveMinimum"]) == ("integer", 0)


def fits(part: dict, value: object) -> bool:
    """The few words of JSON schema that ours uses."""
    if "anyOf" in part:
        return any(fits(option, value) for option in part["anyOf"])
    kinds = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list}
    return (
        isinstance(value, kinds[part["type"]])
        and (part["type"] == "boolean") == isinstance(value, bool)
        and value in part.get("enum", [value])
        and ("minimum" not in part or value >= part["minimum"])
        and ("maximum" not in part or value <= part["maximum"])
        and ("exclusiveMinimum" not in part or value > part["exclusiveMinimum"])
        and (part["type"] != "array" or all(fits(part["items"], item) for item in value))
    )


@pytest.mark.parametrize("path", [*SHIPPED, TRAINING, *REAL], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_shipped_one_fits_the_schema(path):
    settings = settings_of(json_schema())
    table = tomllib.loads(path.read_text())
    assert all(fits(settings[f"{s}.{f}"], value) for s, fields in table.items() for f, value in fields.items())
    for name, wrong in (("optimise.steps", 0), ("optimise.whiten", 1), ("model.dtype", "int8"), ("sft.keep", [1])):
        assert not fits(settings[name], wrong)
