"""Real runs of tiny models, whose tokenizer knows the words that a page must never take for markup."""

import atexit
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import numpy as np
from tokenizers import Tokenizer, decoders, models
from train.tiny import CONFIG, THINK, recorded, save_model
from transformers import PreTrainedTokenizerFast

from memopd.config import load_config
from memopd.evaluate import Measures, Setting, summarise
from memopd.record import write_episodes
from memopd.types import Call, Episode
from memopd.verify.families import VOCABULARY

HOSTILE = [
    "<script>window.pwned=1;alert(1)</script>",
    "</script>",
    "</script><script>window.pwned=2</script>",
    "<img src=x onerror=window.pwned=3>",
    "<!--<script>",
    "-->",
    "<svg onload=window.pwned=4>",
    "&lt;b&gt;",
    '"><b>bold</b>',
    "'${window.pwned=5}`",
    "\u2028\u2029",
    "]]>",
    "<iframe src=https://example.com>",
    "<style>*{display:none}</style>",
]


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    """A word in three is hostile: each of them stands in every episode many times."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    for n, i in enumerate(range(10, VOCABULARY, 3)):
        del words[f"w{i}"]
        words[HOSTILE[n % len(HOSTILE)] + ("" if n < len(HOSTILE) else str(n))] = i
    del words[f"w{THINK}"]
    words["</think>"] = THINK
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


@cache
def workshop() -> Path:
    folder = Path(mkdtemp(prefix="memopd-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    for name, seed in (("student", 0), ("teacher", 1)):
        save_model(folder / name, seed, hostile_tokenizer())
    write_episodes(folder / "episodes", recorded())
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))
    return folder


def run_with_notes(folder: Path, purpose: str) -> Path:
    """A run directory whose only episode has a call with a purpose between its actions, and no traces."""
    episode = recorded()[0]
    first, *rest = episode.calls
    note = replace(first, completion=rest[0].completion, purpose=purpose, trainable=False)
    write_episodes(folder / "episodes" / "step-000000.parquet", [replace(episode, calls=(first, note, *rest))])
    (folder / "config.json").write_text(
        json.dumps({"run": {"seed": 0}, "model": {"student": str(workshop() / "student")}})
    )
    return folder


def add_audits(run: Path) -> dict[str, dict]:
    """As `memopd audit -o` writes them: the same calls in two precisions, the second one without a teacher."""
    import torch

    from memopd.verify.audit import audit
    from memopd.verify.families import tiny_model

    found = {}
    for dtype, teacher in ((torch.float32, tiny_model("llama", 1)), (torch.bfloat16, None)):
        model = tiny_model("qwen2").to(dtype)
        found[str(dtype)[6:]] = audit(model, recorded()[:2], "dense", teacher, name=HOSTILE[0]).as_dict()
    (run / "audit").mkdir()
    for name, report in found.items():
        (run / "audit" / f"{name}.json").write_text(json.dumps(report))
    return found


TOOLS = [
    "<|im_start|>",
    "<|im_end|>",
    "system\nwithin <tools></tools> tags:\n<tools>\n",
    '{"type": "function", "function": {"name": "length_of", "parameters": {"river": "<b>"}}}',
    '\n</tools>\nCall with <tool_call>\n{"name": <function-name>}\n</tool_call>',
    "user\nHow long is the Velm?",
    "assistant\n",
    "<tool_call>",
    '\n{"name": "length_of", "arguments": {"river": "Velm"}}\n',
    '\n{"name": "length_of", "arguments": {\n',
    "</tool_call>",
    "user\n<tool_response>\n",
    *(f"{n} km, says <img src=x onerror=window.pwned=7>\n" for n in range(50)),
    "</tool_response>",
    "It is 90 km long.",
    *(f"One learns it like this: {n}.\n" for n in range(30)),
]


def tool_run(folder: Path) -> Path:
    """A run directory with an agent that calls a tool, is told a long result, and calls it again with broken JSON."""
    words = {word: n for n, word in enumerate(TOOLS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token=TOOLS[0])),
        additional_special_tokens=TOOLS[:2],
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # no space between words
    tokenizer.save_pretrained(folder / "model")
    start, end, result, long = 0, 1, list(range(12, 62)), list(range(64, 94))
    first = [start, 2, 3, 4, *long, end, start, 5, end, start, 6]
    call, broken = [7, 8, 10, end], [7, 9, 10, end]
    second = [*first, *call, start, 11, *result, 62, end, start, 6]
    third = [*second, *broken, start, 11, result[0], 62, end, start, 6]
    calls = [Call(first, call), Call(second, broken), Call(third, [63, end])]
    write_episodes(folder / "episodes" / "step-000000.parquet", [Episode("rivers", "velm", calls, reward=1.0)])
    (folder / "config.json").write_text(json.dumps({"run": {"seed": 0}}))
    return folder


def instructed_run(folder: Path) -> Path:
    """A run directory with two episodes whose prompts begin with the same instructions, and no file of tasks."""
    start, end = "<|im_start|>", "<|im_end|>"
    told = "user\nAnswer in one word, with the unit, and do not explain how you found it.\nQuestion: How long is the "
    words = [start, end, told, "Velm?", "Draza?", "assistant\n", "90 km"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=start)),
        additional_special_tokens=[start, end],
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder / "model")
    episodes = [Episode(words[river], "rivers", [Call([0, 2, river, 1, 0, 5], [6, 1])], reward=1.0) for river in (3, 4)]
    write_episodes(folder / "episodes" / "step-000000.parquet", episodes)
    (folder / "config.json").write_text(json.dumps({"run": {"seed": 0}}))
    return folder


def run_of(state: str = "aligned", seed: int = 0) -> Path:
    """A run of `memopd train` on recorded episodes."""
    return _run(state, seed)


@cache
def _run(state: str, seed: int) -> Path:
    from memopd.train.train import train

    name = f"{state}-{seed}<img src=x onerror=window.pwned=6>"
    settings = {"teacher.state": state, "run.seed": str(seed), "optimise.tasks": "4", "optimise.mini_batch": "2"}
    train(load_config(workshop() / "config.toml", settings), workshop() / name)
    add_evaluation(workshop() / name, "before", 0.3)
    add_evaluation(workshop() / name, "after", 0.6)
    return workshop() / name


def add_evaluation(run: Path, name: str, rate: float) -> None:
    """As `memopd evaluate -o` writes it."""
    from memopd.cli.evaluation import Evaluation

    rng = np.random.default_rng(7)
    draws = rng.random(40)
    runs = [
        [
            Measures(f"t{i}", 2, float(d < rate), float(d < rate), True, 3, 500, 300, 9000, 0.1)
            for i, d in enumerate(draws)
        ]
    ]
    result = summarise(f"{name} <b>system</b>", runs, Setting("squad", "local, cpu", 16))
    (run / "evaluation").mkdir(exist_ok=True)
    evaluation = Evaluation((result,), (tuple(tuple(r) for r in runs),))
    (run / "evaluation" / f"{name}.json").write_text(json.dumps(evaluation.as_dict()))
