"""Killed at any instant and resumed, a run is the one that nobody disturbed: live, and bit for bit."""

import random
import shutil
from functools import cache
from pathlib import Path

import pytest
from command import Command, memopd, on_ranks
from live import policy, world
from safetensors.torch import load_file

from memopd.record import read_episodes
from memopd.train.metrics import is_ours, read_metrics


def train(output: Path, *more: str) -> Command:
    policy()
    return Command("train", world() / "train.toml", "--output", output, *more)


@cache
def undisturbed() -> tuple[Path, float]:
    """A whole run, and how much CPU it took."""
    output = world() / "undisturbed"
    ended = train(output).end()
    assert ended.code == 0, ended.err
    return output, ended.seconds


def numbers(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_metrics(run)]


def sampled(run: Path) -> list:
    episodes = [e for part in sorted((run / "episodes").iterdir()) for e in read_episodes(part)]
    return [(e.id, e.reward, e.calls) for e in episodes]


def assert_same_run(run: Path, other: Path) -> None:
    assert numbers(run) == numbers(other)
    assert sampled(run) == sampled(other)
    for file in ("model/model.safetensors", "checkpoints/step-000005/student-optimiser-00000-of-00001.safetensors"):
        a, b = load_file(run / file), load_file(other / file)
        assert a.keys() == b.keys()
        assert all(a[n].equal(b[n]) for n in a)
    kept = [sorted(str(f.relative_to(r)) for f in r.rglob("*") if "tensorboard" not in str(f)) for r in (run, other)]
    assert kept[0] == kept[1]  # and nothing half written


def disturb(output: Path, instants: list[float]) -> list[str]:
    """Kill the run at each instant of a life of its own, then let it end. What lay there after each death."""
    found = []
    for instant in instants:
        train(output, *["--resume"] * output.exists()).kill_at(instant)
        if (checks := output / "equivalence").is_dir():  # what a life that got further may have left
            (checks / "step-000099-float32.json").write_text("{}")
        latest = output / "checkpoints" / "latest"
        pointer = latest.read_text().strip() if latest.exists() else "no checkpoint"
        found.append(f"killed after {instant:.2f} s: {len(read_metrics(output))} steps, {pointer}")
    ended = train(output, *["--resume"] * output.exists()).end()
    assert ended.code == 0, (found, ended.err)
    return found


@pytest.mark.parametrize("life", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed(life, tmp_path):
    whole, seconds = undisturbed()
    instant = random.uniform(life / 3, (life + 1) / 3) * seconds  # early, in the middle, late: anywhere
    found = disturb(tmp_path / "run", [instant])
    print(found)
    assert_same_run(tmp_path / "run", whole)


LORA = ("--lora.rank", "4", "--optimise.steps", "3", "--run.save_every", "1")


@pytest.mark.slow  # tests/train/test_lora.py has it in small
def test_with_adapters(tmp_path):
    """Live, with the adapter in the engine: killed and resumed; and on two ranks, whose engines have whole copies."""
    runs = {name: tmp_path / name for name in ("whole", "killed", "ranks")}
    ended = train(runs["whole"], *LORA).end()
    assert ended.code == 0, ended.err
    train(runs["killed"], *LORA).kill_at(random.uniform(0.5, 0.9) * ended.seconds)
    assert train(runs["killed"], *LORA, *["--resume"] * runs["killed"].exists()).end().code == 0
    assert numbers(runs["killed"]) == numbers(runs["whole"])
    assert sampled(runs["killed"]) == sampled(runs["whole"])
    a, b = (load_file(runs[name] / "adapter" / "adapter_model.safetensors") for name in ("killed", "whole"))
    assert all(a[n].equal(b[n]) for n in a)
    assert any(a[n].any() for n in a if "lora_B" in n)  # it has learnt, so that the engine's adapter matters
    for done in on_ranks(2, "train", world() / "train.toml", "--output", runs["ranks"], *LORA):
        assert done.code == 0, done.err
    for name in ("whole", "ranks"):
        lines = read_metrics(runs[name])
        assert all(m["first_ratio_error"] == 0 and m["sampler_gap_p99"] < 1e-4 for m in lines)
        assert all(m["reference_kl"] != 0 for m in lines[1:])


@pytest.mark.slow
@pytest.mark.parametrize("life", range(10))
def test_killed_twice_and_resumed(life, tmp_path):
    whole, seconds = undisturbed()
    found = disturb(tmp_path / "run", [random.uniform(0, 0.7) * seconds, random.uniform(0, 0.7) * seconds])
    print(found)
    assert_same_run(tmp_path / "run", whole)


def test_the_comparison_notices_another_seed(tmp_path):
    whole, _ = undisturbed()
    assert train(tmp_path / "run", "--run.seed", "1").end().code == 0
    assert numbers(tmp_path / "run") != numbers(whole)
    assert sampled(tmp_path / "run") != sampled(whole)


def test_episodes_have_several_calls_and_rewards_differ():
    lines = read_metrics(undisturbed()[0])
    assert max(m["calls_per_episode"] for m in lines) > 1
    assert min(m["advantage_std"] for m in lines) > 0.01
    assert all(m["first_ratio_error"] == 0 for m in lines)
    assert all(m["sampler_gap_p99"] < 1e-4 for m in lines)
    assert {"em", "f1", "dev_em", "dev_f1"} <= lines[-2].keys()
    assert all(is_ours(name) for line in lines for name in line)


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(tmp_path):
    whole, _ = undisturbed()
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")  # as if it had been killed just before the export
    assert train(tmp_path / "run", "--resume").end().code == 0
    assert_same_run(tmp_path / "run", whole)


def test_refusals(tmp_path):
    whole, _ = undisturbed()
    assert "exists already; continue it with --resume" in train(whole).end().line()
    changed = train(whole, "--resume", "--optimise.lr", "2e-3", "--teacher.mask", "think").end().line()
    assert "other settings: optimise.lr was 0.001, is 0.002; teacher.mask was 'all', is 'think'" in changed
    assert "there is no run to resume" in train(tmp_path / "nothing", "--resume").end().line()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert "exists already" in train(tmp_path / "other").end().line()
    assert "there is no run to resume" in train(tmp_path / "other", "--resume").end().line()


def test_a_start_that_failed_is_not_in_the_way(tmp_path):
    policy()
    arguments = ("train", world() / "train.toml", "--output", tmp_path / "run", "--optimise.steps", "1")
    assert "nosuch.parquet" in memopd(*arguments, "--tasks.train", tmp_path / "nosuch.parquet").line()
    ended = memopd(*arguments)
    assert ended.code == 0, ended.err


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": \n{"step": 2}\n{"st')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2: not a line of JSON"):
        read_metrics(tmp_path)


def test_killed_before_anything_was_written(tmp_path):
    """All that lies there is a file that was about to become config.json."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.0123.json").write_text("{")
    ended = memopd("train", world() / "train.toml", "--output", tmp_path / "run", "--resume", "--optimise.steps", "1")
    assert ended.code == 0, ended.err
