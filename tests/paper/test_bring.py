"""Runs in a few files: what comes out is what went in, but for checkpoints, and goes on elsewhere."""

import json
import shutil
import tarfile

import pytest
import torch
from random_adapter import write_random
from safetensors.torch import load_file
from small import command, folder

from memopd.files import check_digests
from memopd.models.adapters import check_adapter
from paper import bring
from paper.bring import app
from paper.evaluation import fingerprint


@pytest.fixture
def work(tmp_path):
    made = tmp_path / "there"
    for seed, name in enumerate(("sft-student", "q2/ppo-0", "q2/memopd-0")):
        write_random(made / name / "adapter", folder() / "model", seed)
        (made / name / "config.json").write_text(f'{{"of": "{name}"}}')
        (made / name / "metrics.jsonl").write_text('{"step": 0}\n')
        (made / name / "checkpoints").mkdir()
        (made / name / "checkpoints" / "big").write_bytes(b"0" * 1000)
    (made / "q2" / "unfinished-0").mkdir()
    (made / "q2" / "unfinished-0" / "config.json").write_text("{}")
    (made / "evaluations" / "test").mkdir(parents=True)
    (made / "evaluations" / "test" / "ppo-0-nq-q2.json").write_text('{"k": 2}')
    return made


def files(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_there_and_back(work, tmp_path):
    here = tmp_path / "here"
    assert "3 runs, 1 evaluations" in command(app, "pack", work, tmp_path / "out")
    command(app, "unpack", tmp_path / "out", here)
    assert files(here) == {name for name in files(work) if "checkpoints" not in name and "unfinished" not in name}
    for name in ("sft-student", "q2/ppo-0"):
        adapter, before = here / name / "adapter", work / name / "adapter"
        check_digests(adapter)
        assert check_adapter(str(adapter), str(folder() / "model")).verified
        rounded = load_file(adapter / "adapter_model.safetensors")
        for key, weight in load_file(before / "adapter_model.safetensors").items():
            assert torch.equal(rounded[key], weight.to(torch.bfloat16))
        base = folder() / "model"
        same, precise = (
            [fingerprint(base, str(f), dtype) for f in (adapter, before)] for dtype in ("bfloat16", "float32")
        )
        assert same[0] == same[1]
        assert precise[0] != precise[1]  # in float32 the rounded one is another adapter


def test_results_travel_without_adapters(work, tmp_path):
    here = tmp_path / "here"
    assert "3 runs, 1 evaluations" in command(app, "pack", work, tmp_path / "out", "--results")
    command(app, "unpack", tmp_path / "out", here)
    runs = {
        f"{run}/{name}"
        for run in ("sft-student", "q2/ppo-0", "q2/memopd-0")
        for name in ("config.json", "metrics.jsonl")
    }
    assert files(here) == {*runs, "evaluations/test/ppo-0-nq-q2.json"}
    with pytest.raises(ValueError, match="give one of them"):
        command(app, "pack", work, tmp_path / "out", "--results", "--only", "ppo-0")


def test_equal_files_are_stored_once(work, tmp_path):
    command(app, "pack", work, tmp_path / "out")
    joined = tmp_path / "all.tar.xz"
    joined.write_bytes(b"".join(part.read_bytes() for part in sorted((tmp_path / "out").iterdir())))
    with tarfile.open(joined) as tar:
        linked = {member.name: member.linkname for member in tar if member.islnk()}
    assert linked["q2/ppo-0/adapter/tokenizer.json"] == "q2/memopd-0/adapter/tokenizer.json"
    assert "q2/ppo-0/adapter/adapter_model.safetensors" not in linked


def test_a_run_that_is_finished_here_stays_and_another_is_replaced(work, tmp_path):
    here = tmp_path / "here"
    command(app, "pack", work, tmp_path / "out", "--only", "ppo-0,memopd-0")
    shutil.copytree(work / "q2" / "ppo-0", here / "q2" / "ppo-0")
    (here / "q2" / "memopd-0").mkdir()
    (here / "q2" / "memopd-0" / "metrics.jsonl").write_text("older")
    before = (here / "q2" / "ppo-0" / "adapter" / "adapter_model.safetensors").read_bytes()
    command(app, "unpack", tmp_path / "out", here)
    assert (here / "q2" / "ppo-0" / "adapter" / "adapter_model.safetensors").read_bytes() == before
    assert json.loads((here / "q2" / "memopd-0" / "metrics.jsonl").read_text()) == {"step": 0}
    assert not (here / "evaluations").exists()
    assert not (here / "sft-student").exists()


def test_parts_are_small_and_few(work, tmp_path, monkeypatch):
    monkeypatch.setattr(bring, "SIZE", 20_000)
    monkeypatch.setattr(bring, "PARTS", 100)
    command(app, "pack", work, tmp_path / "out")
    parts = sorted((tmp_path / "out").iterdir())
    assert len(parts) > 1
    assert all(part.stat().st_size <= 20_000 for part in parts)
    command(app, "pack", work, tmp_path / "out", "--results")
    assert [part.name for part in (tmp_path / "out").iterdir()] == ["runs.tar.xz.0"]  # the older parts are gone
    monkeypatch.setattr(bring, "PARTS", 1)
    with pytest.raises(ValueError, match=r"pack in several steps .* the runs are memopd-0, ppo-0, sft-student"):
        command(app, "pack", work, tmp_path / "out")


def test_mistakes_are_named(work, tmp_path):
    with pytest.raises(
        ValueError, match="has no finished run 'unfinished-0': choose from memopd-0, ppo-0, sft-student"
    ):
        command(app, "pack", work, tmp_path / "out", "--only", "unfinished-0")
    with pytest.raises(ValueError, match="has no finished run and no evaluation to pack"):
        command(app, "pack", tmp_path / "empty", tmp_path / "out")
    with pytest.raises(ValueError, match=r"has no runs\.tar\.xz\.0"):
        command(app, "unpack", tmp_path / "empty", tmp_path / "here")
    weights = work / "q2" / "ppo-0" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"ppo-0/adapter: its weights are damaged"):
        command(app, "pack", work, tmp_path / "out")


def test_nothing_is_written_outside(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "out" / "runs.tar.xz.0", "w:xz") as tar:
        tar.add(tmp_path / "x", "../outside")
    with pytest.raises(ValueError, match="would be written outside"):
        command(app, "unpack", tmp_path / "out", tmp_path / "here")
    assert not (tmp_path / "outside").exists()
