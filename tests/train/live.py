"""A small world, and a policy that has learnt the protocol's tags in it: enough for live training of several calls."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from command import memopd

from memopd.world.demonstrations import write_world
from memopd.world.encyclopedia import Difficulty

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SFT = """
[tasks]
dev = "{folder}/world/tasks/dev-q1.parquet"
index = "{folder}/world/index"
max_context = 900

[sampling]
max_tokens = 40
batch = 16

[optimise]
budget = 4096

[sft]
start = "{folder}/shape.json"
tokenizer = "{folder}/world/tokenizer"
episodes = ["{folder}/world/oracle/train/mem1/q1.parquet", "{folder}/world/oracle/train/mem1/q2.parquet"]
dev = ["{folder}/world/oracle/dev/mem1/q1.parquet"]
tokens = 200_000
batch = 4096
lr = 8e-3

[run]
save_every = 24
dev_every = 24
dev_tasks = 8
"""
TRAIN = """
[model]
student = "{folder}/sft/model"
teacher = "{folder}/sft/model"

[tasks]
train = "{folder}/world/tasks/train-q1.parquet"
dev = "{folder}/world/tasks/dev-q1.parquet"
index = "{folder}/world/index"
max_context = 900
reward = "live:brevity"

[sampling]
max_tokens = 40
batch = 6

[optimise]
steps = 5
tasks = 4
samples = 2
mini_batch = 4
budget = 4096
lr = 1e-3
critic_lr = 1e-3

[teacher]
weight = 0.1

[run]
save_every = 2
dev_every = 2
dev_tasks = 4
"""


def brevity(task, responses) -> float:
    """A reward that an untrained policy earns in part: few calls, short ones."""
    return 1.0 / (1 + sum(map(len, responses)) / 100)


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """A folder for all workers of the test run. One worker at a time is inside the block."""
    folder = Path(os.environ["MEMOPD_TESTS"], "live")
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@cache
def world() -> Path:
    """world/, shape.json, sft.toml and train.toml, made by the first worker; sft/ appears with `policy`."""
    with alone("world") as folder:
        if not (folder / "train.toml").is_file():
            write_world(folder / "world", 200, 0, Difficulty(), 40, lambda _, items: items)
            (folder / "shape.json").write_text(json.dumps(SHAPE))
            (folder / "sft.toml").write_text(SFT.format(folder=folder))
            (folder / "train.toml").write_text(TRAIN.format(folder=folder))
    return folder


@cache
def policy() -> Path:
    """The run of `memopd sft` that made the policy, in the first worker that needs it."""
    output = world() / "sft"
    with alone("policy"):
        if not (output / "model").is_dir():
            ended = memopd("sft", world() / "sft.toml", "--output", output)
            assert ended.code == 0, ended.err
    return output
