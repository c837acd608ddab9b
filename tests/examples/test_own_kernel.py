"""A kernel of your own through the command line: it audits, it trains, and a wrong one is found."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from calls import mem1_calls
from safetensors.torch import load_file

from memopd.attention import check_attention
from memopd.cli import main
from memopd.record import write_episodes
from memopd.types import Episode
from memopd.verify.families import tiny_model

ROOT = Path(__file__).parent.parent.parent
STUDENT = ROOT / "models" / "student"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Episodes to audit and train on, and kernels that are wrong in one way each."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    episodes = [Episode(f"e{i}", f"task-{i // 2}", mem1_calls(i), reward=float(i % 2)) for i in range(4)]
    write_episodes(tmp_path / "episodes.parquet", episodes)
    (tmp_path / "wrong_kernels.py").write_text(
        "import torch\n"
        "from own_kernel import Mine\n\n"
        "class OneRowTooMany(Mine):\n"
        "    def __init__(self, packed, device):\n"
        "        super().__init__(packed, device)\n"
        "        self.visible |= torch.ones_like(self.visible).tril(1).triu(1)\n\n"
        "class AsksForMore(Mine):\n"
        "    def __init__(self, packed, device, memory):\n"
        "        super().__init__(packed, device)\n\n"
        "def attend(query, key, value, layer):\n"
        "    return query\n"
    )
    return tmp_path


def memopd(*arguments, monkeypatch) -> int:
    monkeypatch.setattr(sys, "argv", ["memopd", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def audit(folder, kernel, monkeypatch, model=STUDENT) -> int:
    arguments = ("audit", folder / "episodes.parquet", "--model", model, "--attention", kernel, "--json")
    return memopd(*arguments, monkeypatch=monkeypatch)


def test_it_passes_an_audit(folder, monkeypatch, capsys):
    assert audit(folder, "own_kernel:Mine", monkeypatch) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equivalence"]["attention"] == "own_kernel:Mine"
    assert report["passed"]
    assert len((ROOT / "examples" / "own_kernel.py").read_text().splitlines()) < 30


def test_one_that_sees_a_row_too_many_fails_it(folder, monkeypatch, capsys):
    assert audit(folder, "wrong_kernels:OneRowTooMany", monkeypatch) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["equivalence"]["error"] > 100 * report["equivalence"]["tolerance"]


def test_a_layer_that_it_does_not_know_is_refused(folder, monkeypatch, capsys):
    tiny_model("mistral (sliding window)").save_pretrained(folder / "mistral")
    assert audit(folder, "own_kernel:Mine", monkeypatch, folder / "mistral") == 2
    assert "has no sliding windows" in capsys.readouterr().err


NAMES = {
    "own_kernl:Mine": "No module named 'own_kernl'; put its folder in PYTHONPATH, or run from it",
    "own_kernel:Yours": "module 'own_kernel' has no 'Yours'",
    "wrong_kernels:attend": "must be a class with attend; it has no attend",
    "wrong_kernels:AsksForMore": "needs memory; available: packed, device, dtype, config, windowed",
    "fast": "'fast' is not one of auto, dense, cascade, flex; write module:name for your own",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", ["audit", "train", "sft"])
def test_a_name_without_a_kernel_is_one_line_before_a_model_is_loaded(verb, name, folder, monkeypatch, capsys):
    if verb == "audit":
        code = audit(folder, name, monkeypatch, model=folder / "no-model-here")
    else:
        missing = ("--model.student", "./no-model-here", "--sft.start", "./no-model-here", "--sft.episodes", "none")
        (folder / "empty.toml").write_text("")
        arguments = (verb, folder / "empty.toml", "--output", folder / "run", "--model.attention", name, *missing)
        code = memopd(*arguments, monkeypatch=monkeypatch)
        assert not (folder / "run").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memopd: ")]
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"memopd: {'--attention' if verb == 'audit' else 'model.attention'}: {name!r}")
    assert NAMES[name] in lines[0]


def train(folder, kernel, monkeypatch) -> dict[str, torch.Tensor]:
    output = folder / kernel.partition(":")[2]
    code = memopd(
        "train", folder / "train.toml", "--output", output, "--model.attention", kernel, monkeypatch=monkeypatch
    )
    assert code == 0
    return load_file(output / "model" / "model.safetensors")


def test_it_trains(folder, monkeypatch):
    (folder / "train.toml").write_text(
        f'[model]\nstudent = "{STUDENT}"\n[sampling]\nreplay = "{folder}/episodes.parquet"\n'
        '[optimise]\nsteps = 1\ntasks = 4\nmini_batch = 4\nalgorithm = "grpo"\nreference = 0.0\nlr = 1e-3\n'
        '[teacher]\nstate = "none"\n'
    )
    mine, start = train(folder, "own_kernel:Mine", monkeypatch), load_file(STUDENT / "model.safetensors")
    assert any(not torch.equal(mine[n].to(t.dtype), t) for n, t in start.items())
    code = memopd(
        *("train", folder / "train.toml", "--output", folder / "wrong"),
        *("--model.attention", "wrong_kernels:OneRowTooMany"),
        monkeypatch=monkeypatch,
    )
    assert code == 2  # the first batch is always checked


def test_flash_attention_3_that_is_not_installed_is_one_line(monkeypatch):
    if importlib.util.find_spec("flash_attn_interface"):
        pytest.skip("FlashAttention 3 is installed")
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(ValueError, match=r"^model.attention: 'fa3:Cascade': No module named 'flash_attn_interface'"):
        check_attention("fa3:Cascade")
