"""A small world and a tiny random model that speaks its tokens, made once for all tests of this folder."""

import atexit
import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, logging
from typer.testing import CliRunner

from memopd.world.demonstrations import write_world
from memopd.world.encyclopedia import Difficulty

logging.disable_progress_bar()

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip

TRAINING = """
[model]
student = "{folder}/model"
teacher = "{folder}/model"

[tasks]
train = "{folder}/world/tasks/train-q2.parquet"
dev = "{folder}/world/tasks/dev-q2.parquet"
index = "{folder}/world/index"
max_context = 900
reward = "f1"

[sampling]
max_tokens = 8
batch = 8

[optimise]
steps = {steps}
tasks = 2
samples = 2
algorithm = "grpo"
mini_batch = 4
budget = 4096

[run]
save_every = 1
dev_every = 2
dev_tasks = 2
"""
SUITE = """
training = "{folder}/training.toml"
seeds = [0, 1]
concurrent = 2

[arms]
ppo = {{ "teacher.state" = "none" }}
memopd = {{ "teacher.state" = "aligned" }}

[evaluation]
tasks = "{folder}/world/tasks/{{split}}-q{{k}}.parquet"
index = "{folder}/world/index"
limit = 3
max_tokens = 8
max_context = 900
batch = 4
"""


@cache
def folder() -> Path:
    made = Path(mkdtemp(prefix="memopd-"))
    atexit.register(rmtree, made, ignore_errors=True)
    write_world(made / "world", 200, 0, Difficulty(), 2, lambda _, items: items)
    tokenizer = AutoTokenizer.from_pretrained(made / "world" / "tokenizer")
    tokenizer.save_pretrained(made / "model")
    import torch

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), eos_token_id=2, **SHAPE)).save_pretrained(made / "model")
    (made / "training.toml").write_text(TRAINING.format(folder=made, steps=4))
    (made / "suite.toml").write_text(SUITE.format(folder=made))
    return made


def result(system: str, seed: int, k: int, scores: list[tuple[float, float]], settings: dict) -> dict:
    """What an evaluation of this system would have written: EM and F1 of every task."""
    measures = [
        {
            "task": f"t{i}", "k": k, "em": em, "f1": f1, "valid": True, "calls": 3, "peak": 400 + 100 * i,
            "peak_without_q": 200, "dependency": 50_000, "seconds": 2.0,
        }
        for i, (em, f1) in enumerate(scores)
    ]  # fmt: skip
    return {
        "system": system, "seed": seed, "k": k, "model": "somewhere", "weights": "0", "settings": settings,
        "engine": "local, test", "processes": 1, "machine": {"device": "test"}, "seconds": 1.0, "measures": measures,
    }  # fmt: skip


def write_result(path: Path, *arguments) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result(*arguments)))


def command(app, *words) -> str:
    """Run a command of `app` in this process. Its errors are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output
