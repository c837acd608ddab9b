"""Tiny students and teachers, and episodes that a tiny model really sampled."""

import atexit
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, logging

from memopd.record import write_episodes
from memopd.verify.families import VOCABULARY, demo, tiny_model

logging.disable_progress_bar()

THINK = 7  # the id that is the text </think>
EPISODES, CALLS, STEPS = 24, 4, 3

CONFIG = """
[model]
student = "{folder}/student"
teacher = "{folder}/teacher"

[sampling]
replay = "{folder}/episodes"

[optimise]
steps = 3
tasks = 8
mini_batch = 8
budget = 2048
lr = 1e-3
warmup = 0.0
critic_lr = 1e-3
critic_warmup = 0.0

[teacher]
weight = 0.1

[run]
save_every = 1
keep = 3
"""


def word_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(size) if i != THINK} | {"</think>": THINK}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def save_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    tiny_model("qwen2", seed).save_pretrained(folder)
    (tokenizer or word_tokenizer()).save_pretrained(folder)
    return folder


@cache
def recorded(seed: int = 0, episodes: int = EPISODES):
    """Sampled by the student at its start; four episodes a task, rewards of 0, 1 and 2, and r_t here and there."""
    rng = np.random.default_rng(seed)
    made = []
    for i, e in enumerate(demo(episodes, CALLS, seed)[1]):
        calls = [replace(c, reward=float(rng.integers(0, 2)) / 4) for c in e.calls]
        made.append(replace(e, calls=calls, reward=float(rng.integers(0, 3)), task_id=f"task-{i // 4}"))
    return made


@cache
def workshop() -> Path:
    """One for all tests: made when first asked for."""
    folder = Path(mkdtemp(prefix="memopd-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    return make_workshop(folder)


def make_workshop(folder: Path) -> Path:
    """student/, teacher/, config.toml, episodes/; reversed/ and shuffled/: each step's episodes in another order."""
    save_model(folder / "student", 0)
    save_model(folder / "teacher", 1)
    episodes = recorded()
    write_episodes(folder / "episodes", episodes)
    each = len(episodes) // STEPS
    steps = [episodes[at : at + each] for at in range(0, len(episodes), each)]
    write_episodes(folder / "reversed", [e for step in steps for e in step[::-1]])
    order = np.random.default_rng(0).permutation(each)
    write_episodes(folder / "shuffled", [step[i] for step in steps for i in order])
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    return folder
