"""Checkpoints: whole or not at all, for any number of ranks, and a model that transformers loads."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from command import on_ranks
from saved import read_whole
from tiny import workshop
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd import files
from memopd.train import checkpoint
from memopd.train.checkpoint import latest, load, read_state, save

NAMES = ("student", "student-optimiser", "critic", "critic-optimiser")


def run(output, ranks: int, *more: str) -> None:
    arguments = ("train", workshop() / "config.toml", "--output", output, "--optimise.steps", "2", *more)
    for ended in on_ranks(ranks, *arguments):
        assert ended.code == 0, ended.err


@pytest.mark.parametrize(("first", "then"), [pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_saved_with_some_ranks_and_resumed_with_others(first, then, tmp_path):
    run(tmp_path / "run", first)
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    before = {name: read_whole(saved, name) for name in NAMES}
    assert len(list(saved.glob("student-[0-9]*"))) == first
    # Resumed where it ended: what is exported was read by another number of ranks, to the bit.
    shutil.rmtree(tmp_path / "run" / "model")
    run(tmp_path / "run", then, "--resume")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    assert all(torch.equal(p, before["student"][n]) for n, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").get_vocab()["</think>"] == 7
    # Resumed one step earlier: the same step again, by another number of ranks, up to rounding.
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-000001")
    run(tmp_path / "run", then, "--resume")
    assert len(list(saved.glob("student-[0-9]*"))) == then
    for name in NAMES:
        after = read_whole(saved, name)
        assert after.keys() == before[name].keys()
        for n, tensor in after.items():
            assert (tensor - before[name][n]).norm() <= 1e-4 * before[name][n].norm(), (name, n)


def test_the_same_tensors_from_any_number_of_ranks(tmp_path):
    """Cut as two, three and seven ranks would cut them, read by one; and the reverse, row by row."""
    torch.manual_seed(0)
    whole = {"w": torch.randn(10, 3), "b": torch.randn(5), "one": torch.randn(1, 4), "step": torch.tensor(3.0)}
    for ranks in (1, 2, 3, 7):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for rank in range(ranks):
            _write_as(folder, whole, rank, ranks)
        got = {n: torch.zeros_like(t) for n, t in whole.items()}
        load(folder, "student", got)
        again = read_whole(folder, "student")
        assert all(torch.equal(got[n], whole[n]) and torch.equal(again[n], whole[n]) for n in whole)


def _write_as(folder, whole, rank, ranks) -> None:
    from safetensors.torch import save_file

    rows, starts = {}, {}
    for name, tensor in whole.items():
        chunk = -(-len(tensor) // ranks) if tensor.ndim else 0
        starts[name] = str(min(chunk * rank, len(tensor))) if tensor.ndim else "0"
        rows[name] = tensor[chunk * rank : chunk * (rank + 1)].clone() if tensor.ndim else tensor
    save_file(rows, folder / f"student-{rank:05d}-of-{ranks:05d}.safetensors", starts)


def test_a_tensor_with_missing_rows_is_noticed(tmp_path):
    whole = {"w": torch.randn(10, 3)}
    _write_as(tmp_path, whole, 0, 2)
    with pytest.raises(ValueError, match="student: w is incomplete"):
        load(tmp_path, "student", {"w": torch.zeros(10, 3)})


def tensors(value: float):
    return {"student": {"w": torch.full((4, 2), value)}, "student-optimiser": {"w.step": torch.tensor(value)}}


def test_only_so_many_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, tensors(step), keep=2)
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000003", "step-000004"]
    # Whoever goes back to an older one does not lose what is saved then.
    (tmp_path / "checkpoints" / "latest").write_text("step-000003")
    (tmp_path / "checkpoints" / "step-000004").rename(tmp_path / "checkpoints" / "step-000009")
    save(tmp_path, 4, tensors(5), keep=1)
    assert read_whole(latest(tmp_path), "student")["w"][0, 0] == 5


OPERATIONS = [
    (shutil, "rmtree"),
    (files, "rmtree"),
    (checkpoint, "save_file"),
    (checkpoint, "digest"),
    (json, "dumps"),
    (os, "fsync"),
    (Path, "rename"),
    (checkpoint, "_steps"),
]


@pytest.mark.parametrize(("owner", "name"), OPERATIONS, ids=[f"{owner.__name__}.{name}" for owner, name in OPERATIONS])
@pytest.mark.parametrize("nth", range(6))
def test_broken_off_anywhere_the_last_one_is_intact(owner, name, nth, tmp_path, monkeypatch):
    """An interruption in place of the nth use of each thing that writes."""
    save(tmp_path, 1, tensors(1), keep=1)
    do, count = getattr(owner, name), iter(range(100))

    def broken(*arguments, **options):
        if next(count) == nth:
            raise KeyboardInterrupt
        return do(*arguments, **options)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(owner, name, broken)
        save(tmp_path, 2, tensors(2), keep=1)
    folder = latest(tmp_path)
    step = read_state(folder)["step"]
    assert read_whole(folder, "student")["w"].unique().tolist() == [step]
    save(tmp_path, 2, tensors(2), keep=1)
    assert read_state(latest(tmp_path))["step"] == 2


def test_without_latest_the_newest_complete_one_is_used(tmp_path):
    """Also the first one, if the run was killed before it wrote `latest`. No checkpoint is no reason to start again."""
    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(checkpoint, "whole", _killed)
        save(tmp_path, 1, tensors(1), keep=3)
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    for step in (2, 1_000_000, 999_999):
        save(tmp_path, step, tensors(step), keep=9)
    (tmp_path / "checkpoints" / "latest").unlink()
    (tmp_path / "checkpoints" / "step-2000000").mkdir()  # not complete
    newest = latest(tmp_path)
    assert newest.name == "step-1000000"
    assert read_state(newest)["step"] == 1_000_000
    (newest / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"step-1000000: not a complete checkpoint .* write step-999999 into "):
        latest(tmp_path)
    assert latest(tmp_path / "elsewhere") is None


def _killed(*arguments, **options):
    raise KeyboardInterrupt
