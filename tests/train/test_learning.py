"""Does it learn?

Quickly: PPO alone, with a critic and without, from a tiny policy and a reward that every episode has some of.

In earnest: twenty updates of MemOPD from the shipped student on a CPU, three seeds. The reward of training episodes in
the last five updates, less that in the first five. Every update asks tasks that were not asked before. The four
episodes of a task are alike, so that the tasks are what is counted: the standard error is that of a difference between
the means of two sets of tasks. Beyond noise: every seed gains, and the mean of the three gains is more than three
standard errors above zero. The result is written to paper/world/results/learning.json.
"""

import json
import math
import platform
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from command import Command, memopd
from live import policy, world

from memopd.config import load_config
from memopd.evaluate.provenance import source
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "world.toml"
RESULT = ROOT / "paper" / "world" / "results" / "learning.json"
SEEDS, UPDATES, EACH = (0, 1, 2), 20, 5
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, seed: int) -> Command:
    settings = {
        "--model.student": ROOT / "models" / "student",
        "--model.teacher": ROOT / "models" / "teacher",
        "--tasks.train": folder / "world" / "tasks" / "train-q2.parquet",
        "--tasks.index": folder / "world" / "index",
        "--tasks.dev": "",
        "--run.dev_every": 0,
        "--run.seed": seed,
    }
    given = [part for pair in settings.items() for part in pair]
    return Command("train", CONFIG, "--output", folder / f"seed-{seed}", *given, environment=NO_GPU)


def of_tasks(run: Path, steps: range) -> np.ndarray:
    """The mean reward of every task that was asked in these updates."""
    rewards: dict[str, list[float]] = {}
    for step in steps:
        for episode in read_episodes(run / "episodes" / f"step-{step:06d}.parquet"):
            rewards.setdefault(episode.task_id, []).append(episode.reward)
    return np.array([np.mean(r) for r in rewards.values()])


def gain(first: np.ndarray, last: np.ndarray) -> tuple[float, float]:
    """(difference of the means, its standard error)"""
    variance = first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last)
    return float(last.mean() - first.mean()), float(math.sqrt(variance))


def together(gains: list[tuple[float, float]]) -> tuple[float, float]:
    """(mean of the gains, its standard error)"""
    return float(np.mean([g for g, _ in gains])), math.sqrt(sum(e * e for _, e in gains)) / len(gains)


def test_the_test_itself():
    """By hand: means 0.5 and 1, variances 0.5 and 2 of two tasks each."""
    difference, error = gain(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    assert (difference, error) == (0.5, pytest.approx(math.sqrt(0.25 + 1.0)))
    assert together([(0.5, 3.0), (1.0, 4.0)]) == (0.75, 2.5)
    # Two samples of one distribution are three errors apart about once in 700 times.
    rng = np.random.default_rng(0)
    noise = [gain(rng.uniform(size=40), rng.uniform(size=40)) for _ in range(2000)]
    assert 0 < np.mean([d > 3 * e for d, e in noise]) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_ppo_alone_learns_what_is_rewarded(algorithm, tmp_path):
    """Fewer and shorter responses, in ten updates."""
    policy()
    settings = {
        "--teacher-state": "none",
        "--optimise.algorithm": algorithm,
        "--optimise.steps": 10,
        "--optimise.tasks": 8,
        "--optimise.samples": 4,
        "--optimise.mini_batch": 16,
        "--sampling.batch": 32,
        "--run.dev_every": 0,
        "--run.save_every": 10,
    }
    given = [part for pair in settings.items() for part in pair]
    ended = memopd("train", world() / "train.toml", "--output", tmp_path / "run", *given)
    assert ended.code == 0, ended.err
    difference, error = gain(of_tasks(tmp_path / "run", range(3)), of_tasks(tmp_path / "run", range(7, 10)))
    print(f"{algorithm}: {difference:.3f} ± {error:.3f}")
    assert difference > 4 * error
    first, *_, last = read_metrics(tmp_path / "run")
    assert last["response_tokens"] < 0.8 * first["response_tokens"]


@pytest.mark.slow
def test_twenty_updates_raise_the_reward(tmp_path):
    assert load_config(CONFIG).optimise.steps == UPDATES
    made = memopd("world", tmp_path / "world", "--episodes", "0")
    assert made.code == 0, made.err
    runs = [start(tmp_path, seed) for seed in SEEDS]  # at once: each has a thread of its own
    for run in runs:
        ended = run.end()
        assert ended.code == 0, ended.err
    gains = write_result([tmp_path / f"seed-{seed}" for seed in SEEDS], RESULT)
    mean, error = together(gains)
    print(f"gain {mean:.3f} ± {error:.3f}; by seed {[f'{g:.3f} ± {e:.3f}' for g, e in gains]}")
    assert all(g > 0 for g, _ in gains)
    assert mean > 3 * error


def write_result(runs: list[Path], file: Path) -> list[tuple[float, float]]:
    found, gains = [], []
    for run in runs:
        gains.append(gain(of_tasks(run, range(EACH)), of_tasks(run, range(UPDATES - EACH, UPDATES))))
        metrics = read_metrics(run)
        found.append(
            {
                "seed": json.loads((run / "config.json").read_text())["run"]["seed"],
                "gain": round(gains[-1][0], 4),
                "standard_error": round(gains[-1][1], 4),
                "reward": [round(m["reward"], 4) for m in metrics],
                "teacher_kl": [round(m["loss_opd"], 4) for m in metrics],
            }
        )
    mean, error = together(gains)
    trained = json.loads((runs[0] / "config.json").read_text())
    o = trained["optimise"]
    result = {
        **source(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": "pytest -m slow tests/train/test_learning.py",
        "machine": f"CPU, {platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "what": f"configs/world.toml: {UPDATES} updates of {o['tasks']} tasks x {o['samples']} "
        f"episodes of two questions; mean reward of the last {EACH} updates less the first {EACH}; errors over tasks",
        "trained_with": trained,
        "gain": round(mean, 4),
        "standard_error": round(error, 4),
        "seeds": found,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    return gains
