"""A broken model folder is one line that names the file, whichever command reads it; other errors keep their trace."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from calls import mem1_calls
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memopd import cli
from memopd.config import RunConfig
from memopd.models.folder import check_on_hub
from memopd.models.load import check_model_folder, load_causal_lm, load_tokenizer
from memopd.record import write_episodes
from memopd.retrieval import build_index
from memopd.types import Episode
from memopd.verify.families import FAMILIES, VOCABULARY, tiny_model


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact") / "model"
    tiny_model("qwen2").save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "model")


# ---- the ways to break one --------------------------------------------------------------------------------------

Break = Callable[[Path], object]


def content(name: str, text: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def cut(name: str) -> Break:
    """To a tenth of its length."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 10)


def settings(name: str = "config.json", /, **changed: object) -> Break:
    def change(folder: Path) -> None:
        before = json.loads((folder / name).read_text())
        after = {key: value for key, value in (before | changed).items() if value is not ...}
        (folder / name).write_text(json.dumps(after))

    return change


def index(value: object) -> Break:
    def shard(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(value))

    return shard


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return rewrite


CONFIG = {
    "a list": (content("config.json", "[1]"), "must be a JSON object, is a list"),
    "a string": (content("config.json", '"qwen2"'), "must be a JSON object, is a str"),
    "empty": (content("config.json", ""), "not JSON"),
    "no JSON": (content("config.json", "{"), "not JSON"),
    "deep": (content("config.json", "[" * 100_000), "not JSON"),
    "not UTF-8": (content("config.json", b"\xff\xfe{}"), "not JSON"),
}
SHAPE = {
    "an unknown model_type": (settings(model_type="nosuch"), 'model_type "nosuch" is unknown to transformers'),
    "no model_type": (settings(model_type=...), "has no model_type"),
    "a model_type that is a list": (settings(model_type=["qwen2"]), "has no model_type"),
    "no heads": (settings(num_attention_heads=0), "num_attention_heads must be 1 or more, got 0"),
    "no heads for keys": (settings(num_key_value_heads=0), "num_key_value_heads must be 1 or more, got 0"),
    "an odd number of heads": (
        settings(num_attention_heads=3),
        "hidden_size 64 is not divisible by num_attention_heads 3",
    ),
    "heads that cannot be shared": (settings(num_key_value_heads=3), "4 is not divisible by num_key_value_heads 3"),
    "no vocabulary": (settings(vocab_size=0), "vocab_size must be 1 or more, got 0"),
    "a size that is text": (settings(hidden_size="big"), "'hidden_size' expected int, got str"),
    "a number that is text": (settings(rms_norm_eps="x"), "'rms_norm_eps' expected float, got str"),
    "an unknown activation": (
        settings(hidden_act="nosuch"),
        "transformers can make no model of it (KeyError: 'nosuch')",
    ),
    "a size beyond all memory": (
        settings(hidden_size=4 * 10**12),
        "transformers can make no model of it (RuntimeError",
    ),
    "an unknown precision": (settings(dtype="floaty"), 'dtype: "floaty" is not a precision of torch'),
    "quantised": (settings(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised models"),
    "quantised as text": (settings(quantization_config="4 bits"), "quantised models"),
    "remote code": (
        settings(auto_map={"AutoModelForCausalLM": "modeling.Mine"}),
        "names Python code of its own (auto_map)",
    ),
}
WEIGHTS = {
    "other sizes": (settings(intermediate_size=7), "mlp.down_proj.weight has shape (64, 96), and must have (64, 7)"),
    "another vocabulary": (settings(vocab_size=999), "model.embed_tokens.weight has shape (131, 64)"),
    "missing weights": (
        weights(lambda w: w.pop("model.norm.weight")),
        "lack 1 of the model's weights, such as model.norm",
    ),
    "more layers": (settings(num_hidden_layers=5, layer_types=...), "such as model.layers.3.input_layernorm.weight"),
    "fewer layers": (settings(num_hidden_layers=1, layer_types=...), "such as model.layers.1.input_layernorm.weight"),
    "cut weights": (cut("model.safetensors"), "its weights are cut short or damaged"),
    "empty weights": (content("model.safetensors", ""), "its weights are cut short or damaged"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "has no weights (no model.safe",
    ),
    "an adapter": (content("adapter_config.json", "{}"), "has an adapter beside the model"),
    "an index that is a list": (index([]), "model.safetensors.index.json: must be a JSON object, is a list"),
    "an index of nothing": (index({}), "model.safetensors.index.json: has no weight_map"),
    "an index of a list": (index({"weight_map": [1]}), "model.safetensors.index.json: has no weight_map"),
    "an index of missing files": (
        index({"weight_map": {"a": "b.safetensors"}}),
        "b.safetensors: missing, but model.safe",
    ),
    "generation_config.json": (
        content("generation_config.json", "[1]"),
        "generation_config.json: must be a JSON object",
    ),
    "an end that is text": (settings("generation_config.json", eos_token_id="x"), "eos_token_id must be a token id"),
}
TOKENIZER = {
    "tokenizer.json is a list": (content("tokenizer.json", "[1]"), "tokenizer.json: must be a JSON object, is a list"),
    "tokenizer.json is cut": (cut("tokenizer.json"), "tokenizer.json: not JSON"),
    "tokenizer.json is empty": (content("tokenizer.json", ""), "tokenizer.json: not JSON"),
    "tokenizer.json is another object": (content("tokenizer.json", "{}"), "tokenizer.json: not a tokenizer (no model"),
    "tokenizer.json has a broken model": (
        settings("tokenizer.json", model={"type": "BPE", "vocab": 3}),
        "tokenizer.json: not a tokenizer (Exception: ",
    ),
    "tokenizer.json is missing": (
        lambda f: (f / "tokenizer.json").unlink(),
        "no tokenizer can be loaded from it (it has no",
    ),
    "tokenizer_config.json is a list": (
        content("tokenizer_config.json", "[1]"),
        "tokenizer_config.json: must be a JSON obj",
    ),
    "tokenizer_config.json is cut": (cut("tokenizer_config.json"), "tokenizer_config.json: not JSON"),
    "a class that is a number": (settings("tokenizer_config.json", tokenizer_class=3), "tokenizer_class: 3 is not"),
    "a token that is a number": (settings("tokenizer_config.json", eos_token=5), "eos_token: 5 is not"),
    "tokens in a list": (
        settings("tokenizer_config.json", added_tokens_decoder=[1]),
        "added_tokens_decoder: [1] is not",
    ),
    "a map that is a list": (
        content("special_tokens_map.json", "[1]"),
        "special_tokens_map.json: must be a JSON object",
    ),
    "code for a tokenizer": (settings("tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}), "auto_map"),
    "a configuration of lists": (settings(model_type=["qwen2"]), "config.json: transformers cannot read it (TypeError"),
}


def cases(*tables: dict[str, tuple[Break, str]]) -> pytest.MarkDecorator:
    found = [pytest.param(*case, id=name) for table in tables for name, case in table.items()]
    return pytest.mark.parametrize(("broken", "complaint"), found)


def refused(load: Callable[[], object], folder: Path, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load()
    line = str(error.value)
    assert line.startswith(str(folder))
    assert complaint in line
    assert "\n" not in line


@cases(CONFIG, SHAPE, WEIGHTS)
def test_a_broken_model(broken, complaint, folder):
    broken(folder)
    refused(lambda: load_causal_lm(str(folder), torch.float32), folder, complaint)


@cases(CONFIG, TOKENIZER)
def test_a_broken_tokenizer(broken, complaint, folder):
    broken(folder)
    refused(lambda: load_tokenizer(str(folder)), folder, complaint)


def test_a_run_directory_and_an_adapter_are_no_models(intact, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(RunConfig().as_json())
    loads = (check_model_folder, load_tokenizer, lambda path: load_causal_lm(path, torch.float32))
    for load in loads:
        refused(lambda load=load: load(str(run)), run, "is a run directory without model/ or adapter/, which training")
    shutil.copytree(intact, run / "adapter")  # its tokenizer
    (run / "adapter" / "config.json").rename(run / "adapter" / "adapter_config.json")
    settings("adapter_config.json", base_model_name_or_path="org/own")(run / "adapter")
    part = f"give its base (org/own) as the model and {run / 'adapter'} as the adapter"
    for load in loads:
        refused(lambda load=load: load(str(run)), run, f"{run}: is the run of an adapter: {part}")
    (run / "adapter" / "memopd.json").write_text('{"base": "../named"}')
    refused(lambda: check_model_folder(str(run)), run, "give its base (../named) as the model")
    complaint = "is an adapter: give its base (../named) as the model and this folder as the adapter"
    for load in (loads[0], loads[2]):
        refused(lambda load=load: load(str(run / "adapter")), run / "adapter", complaint)
    load_tokenizer(str(run / "adapter"))  # an adapter has the tokenizer of its base
    (run / "adapter" / "memopd.json").unlink()
    (run / "adapter" / "adapter_config.json").write_text("{}")
    refused(lambda: check_model_folder(str(run)), run, "give its base as the model")
    shutil.copytree(intact, run / "model")
    for load in loads:
        refused(lambda load=load: load(str(run)), run, f"{run}: is a run directory: give {run / 'model'}")
        load(str(run / "model"))


@cases(CONFIG, SHAPE)
def test_a_broken_configuration_for_random_weights(broken, complaint, folder):
    broken(folder)
    shape = folder / "config.json"
    refused(lambda: load_causal_lm(str(shape), torch.float32), shape, complaint)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_was_written(family, tmp_path):
    """None of the checks refuses a model that is intact."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    before, after = model.state_dict(), load_causal_lm(str(tmp_path), torch.float32).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_in_several_files(intact, tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    one, several = (load_causal_lm(str(f), torch.float32).state_dict() for f in (intact, tmp_path))
    assert all(torch.equal(one[name], several[name]) for name in one)


@pytest.mark.parametrize("owner", ["AutoModelForCausalLM", "AutoTokenizer"])
def test_an_error_that_is_not_the_folders_keeps_its_trace(owner, intact, monkeypatch):
    def internal(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(getattr(transformers, owner), "from_pretrained", internal)
    with pytest.raises(RuntimeError, match="a bug"):
        load_causal_lm(str(intact), torch.float32) if "Model" in owner else load_tokenizer(str(intact))


@pytest.mark.parametrize("name", ["models/foo", "foo", "foo bar"])
def test_a_name_that_is_no_folder_and_not_on_the_hub(name, tmp_path, monkeypatch):
    """Tests are offline; the hub is asked once, without the retries of transformers."""
    monkeypatch.chdir(tmp_path)
    for load in (lambda: load_causal_lm(name, torch.float32), lambda: load_tokenizer(name)):
        with pytest.raises(ValueError, match=f"^{name}: there is no such folder, and ") as error:
            load()
        assert "\n" not in str(error.value)


def test_a_model_in_the_hubs_cache_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("memopd.models.folder.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    check_on_hub("organisation/model")


# ---- through the command line -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Arguments of every command that reads a model, which stands for MODEL."""
    place = tmp_path_factory.mktemp("commands")
    corpus, tasks, store = place / "corpus.jsonl", place / "tasks.jsonl", place / "episodes"
    corpus.write_text('{"id": "1", "contents": "a title\\nsome text"}\n')
    tasks.write_text('{"id": "1", "question": "who?", "golden_answers": ["me"]}\n')
    build_index(corpus, place / "index")
    write_episodes(store, [Episode("e0", "t", mem1_calls(0))])
    settings = place / "config.toml"
    settings.write_text(f'[sampling]\nreplay = "{store}"\n[teacher]\nstate = "none"\n[sft]\nepisodes = ["{store}"]\n')
    played = ("--model", "MODEL", "--index", place / "index", "--max-context", 64, "--max-tokens", 8)
    run = (settings, "--output", place / "run")
    return {
        "audit": ("audit", store, "--model", "MODEL"),
        "rollout": ("rollout", tasks, "-o", place / "out", *played),
        "evaluate": ("evaluate", tasks, *played),
        "gateway": ("gateway", "--store", place / "recorded", "--model", "MODEL", "--port", 0),
        "train": ("train", *run, "--model.student", "MODEL"),
        "sft": ("sft", *run, "--sft.start", "MODEL"),
    }


SLOW = pytest.param("evaluate", marks=pytest.mark.slow)  # it reads the model as `rollout` does


@pytest.mark.parametrize("command", ["audit", "rollout", SLOW, "gateway", "train", "sft"])
def test_every_command_answers_with_one_line(command, commands, intact, tmp_path, monkeypatch, capfd):
    reads_tokenizer = {} if command in ("audit", "train") else TOKENIZER  # train reads the model first
    for name, (broken, _) in (CONFIG | SHAPE | WEIGHTS | reads_tokenizer).items():
        folder = shutil.copytree(intact, tmp_path / name.replace(" ", "-"))
        broken(folder)
        arguments = [str(folder) if a == "MODEL" else str(a) for a in commands[command]]
        monkeypatch.setattr(sys, "argv", ["memopd", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = capfd.readouterr()
        assert stopped.value.code == 2, (name, shown.err)
        (line,) = shown.err.splitlines()
        assert line.startswith(f"memopd: {folder}"), (name, line)
        shutil.rmtree(folder)
