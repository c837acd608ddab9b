"""Whatever lies where a command expects a file, the answer is one line or a result, and never a traceback."""

import gzip
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import mem1_calls
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memopd import cli
from memopd.record import write_episodes
from memopd.retrieval import build_index
from memopd.types import Episode
from memopd.verify.families import VOCABULARY, tiny_model
from memopd.world.tokenizer import train_tokenizer

RUNS = 500
SUFFIXES = ("", ".json", ".jsonl", ".jsonl.gz", ".parquet", ".toml", ".txt")
VALUES = ("null", "[]", "[1, 2]", '"text"', "{}", "3", "NaN", '{"id": 1}', '{"id": "a", "question": 3}',
          '{"id": "a", "question": "b", "golden_answers": [null]}', '{"episode": [], "prompt": {}}', '{"results": 1}',
          '{"tasks": [], "results": [1]}', "9" * 5000, "[" * 5000, '{"a": 1, "a": 2}')  # fmt: skip
TABLES = (
    "[model]\nstudent = 3\n",
    "[nosuch]\na = 1\n",
    "model = 3\n",
    "[optimise]\nlr = nan\n",
    "[run]\nseed = 1e400\n",
)


def folder(path: Path, rng: random.Random) -> None:
    path.mkdir()
    for _ in range(rng.randrange(3)):
        names = (
            "config.json",
            "x.parquet",
            "memopd-index.json",
            "metrics.jsonl",
            "tokenizer.json",
            "meta.json",
            "notes",
        )
        ANY[rng.choice(list(ANY))](path / rng.choice(names), rng)


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def not_utf8(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"\xff\xfe", b'{"id": "', b"\x89PNG\r\n\x1a\n", b"PAR1")) + rng.randbytes(400))


def wrong_type(path: Path, rng: random.Random) -> None:
    text = rng.choice((*VALUES, *TABLES)) + rng.choice(("", "\n"))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def other_table(path: Path, rng: random.Random) -> None:
    columns = {"id": [1, 2], "question": [None, "b"], "episode": ["a", "b"], "prompt": [[1], []], "step": [0, 1]}
    some = rng.sample(list(columns), rng.randrange(1, 5))
    pq.write_table(pa.table({name: columns[name] for name in some}), path)


def huge(path: Path, rng: random.Random) -> None:
    """Eight million characters on one line, or 64 MB of zeros that take no room on the disk."""
    if rng.random() < 0.5:
        path.write_text('{"id": "' + "x" * 8_000_000 + '"}')
    else:
        path.touch()
        os.truncate(path, 64 << 20)


ANY: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": empty, "not UTF-8": not_utf8, "wrong type": wrong_type, "other table": other_table, "huge": huge,
}  # fmt: skip
KINDS = {"folder": folder} | ANY


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("intact")
    (place / "corpus.jsonl").write_text('{"id": "1", "contents": "a title\\nsome text"}\n')
    (place / "tasks.jsonl").write_text('{"id": "1", "question": "who?", "golden_answers": ["me"]}\n')
    build_index(place / "corpus.jsonl", place / "index")
    write_episodes(place / "store", [Episode("e0", "t", mem1_calls(0))])
    tiny_model("qwen2").save_pretrained(place / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY - 1)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(place / "model")
    train_tokenizer(["who? me", "some text"], size=265).save_pretrained(place / "tokenizer")
    (place / "calls.jsonl").write_text('{"episode": "a", "prompt": [5], "completion": [8]}\n')
    train = f'[model]\nstudent = "{place}/model"\n[sampling]\nreplay = "{place}/store"\n[teacher]\nstate = "none"\n'
    sft = f'[sft]\nstart = "{place}/model"\nepisodes = ["{place}/store"]\nkeep = []\ntokens = 2000\nbatch = 512\n'
    (place / "config.toml").write_text(train + sft)
    return place


def commands(place: Path, output: Path) -> list[tuple[list[object], object]]:
    """Every command that takes a file, with FILE at the place of each of its files, and what belongs there.

    With that the command succeeds. None: it would serve for ever, or start an interpreter that has vLLM.
    """
    names = ("config.toml", "store", "model", "tasks.jsonl", "index", "tokenizer", "corpus.jsonl", "calls.jsonl")
    config, store, model, tasks, index, tokenizer, corpus, calls = (place / name for name in names)
    budget, steps = ["--optimise.budget", 2048], ["--optimise.steps", 1]
    train, sft = ["train", config, *steps, *budget], ["sft", config, *budget]
    guess, scripted = ["--policy", "guess"], ["--policy", "guess", "--tokenizer", tokenizer, "--index", index]
    small = ["--max-context", 400, "--max-tokens", 8]
    new, run = output / "new", ["--output", output]
    evaluated = output / "results.json"
    live = ["--replay", "", "--model.student", model, "--sampling.max_tokens", 8, "--tasks.max_context", 400]
    return [
        (["config", "FILE"], config),
        (["train", "FILE", *steps, *budget, *run], config),
        ([*train, *run, "--replay", "FILE"], store),
        ([*train, *run, "--model.student", "FILE"], model),
        ([*train, "--output", "FILE"], new),
        ([*train, "--output", "FILE", "--resume"], None),
        ([*train, *run, *live, "--tasks.index", index, "--tasks.train", "FILE"], None),
        ([*train, *run, *live, "--tasks.index", "FILE", "--tasks.train", tasks], None),
        (["sft", "FILE", *budget, *run], config),
        ([*sft, *run, "--sft.episodes", "FILE"], store),
        ([*sft, *run, "--sft.start", "FILE"], model),
        ([*sft, *run, "--sft.tokenizer", "FILE"], model),
        (["import", "FILE", "-o", output], calls),
        (["import", calls, "-o", "FILE"], new),
        (["audit", "FILE", "--model", model], store),
        (["audit", store, "--model", "FILE"], model),
        (["audit", store, "--model", model, "--teacher", "FILE"], model),
        (["audit", store, "--model", model, "-o", "FILE"], new),
        (["draw", "FILE", "--episode", "e0", "-o", output / "a.png"], store),
        (["draw", store, "--episode", "e0", "-o", "FILE"], output / "a.png"),
        (["index", "build", "FILE", "-o", output], corpus),
        (["index", "build", "FILE", "-o", output, "--skip-bad"], corpus),
        (["index", "build", corpus, "-o", "FILE"], new),
        (["index", "info", "FILE"], index),
        (["serve", "retrieval", "FILE", "--port", 0], None),
        (["serve", "policy", "FILE", "--python", place / "no-python"], None),
        (["tasks", "build", "FILE", "-k", 1, "-o", output / "t.parquet"], tasks),
        (["tasks", "build", tasks, "-k", 1, "-o", "FILE"], output / "t.parquet"),
        (["tasks", "show", "FILE"], tasks),
        (["tasks", "show", "FILE", "--skip-bad"], tasks),
        (["rollout", "FILE", "-o", output, *scripted], tasks),
        (["rollout", tasks, "-o", "FILE", *scripted], new),
        (["rollout", tasks, "-o", output, *scripted, "--train", "FILE"], tasks),
        (["rollout", tasks, "-o", output, *guess, "--tokenizer", tokenizer, "--index", "FILE"], index),
        (["rollout", tasks, "-o", output, *guess, "--index", index, "--tokenizer", "FILE"], tokenizer),
        (["evaluate", "FILE", *scripted], tasks),
        (["evaluate", tasks, *scripted, "-o", "FILE"], evaluated),
        (["evaluate", tasks, *scripted, "--against", "FILE"], evaluated),
        (["evaluate", tasks, "--index", index, "--tokenizer", tokenizer, *small, "--model", "FILE"], None),
        (["gateway", "--store", output, "--model", "FILE"], None),
        (["report", "FILE", "-o", output / "page.html"], place / "run"),
        (["world", "FILE", "--passages", 200, "--episodes", 0], new),
    ]


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The status of the command in this process, or the error that it let out."""
    monkeypatch.setattr(sys, "argv", ["memopd", *arguments])
    try:
        cli.main()
    except SystemExit as stopped:
        return stopped.code or 0
    except BaseException as error:  # collected, so that one run tells all faults
        return f"{type(error).__name__}: {error}"
    return 0


def name_of(command: list[object]) -> str:
    return " ".join(map(str, command[: 2 if command[0] in ("index", "serve", "tasks") else 1]))


@pytest.mark.slow
def test_with_intact_files_the_commands_succeed(place, tmp_path, monkeypatch, capfd):
    """So that below it is the broken file which is refused, and nothing before it."""
    (place / "run").mkdir()
    whole = ["train", place / "config.toml", "--output", place / "run", "--optimise.steps", 1]
    assert run([str(a) for a in whole], monkeypatch) == 0, capfd.readouterr().err
    failed = []
    results = tmp_path / "results.json"
    for number in range(len(commands(place, tmp_path))):
        output = tmp_path / str(number)
        command, belongs = commands(place, output)[number]
        if belongs is None:
            continue
        if belongs == output / "results.json":  # one command writes it, the next reads it
            belongs = results
        arguments = [str(a).replace("FILE", str(belongs)) for a in command]
        if (code := run(arguments, monkeypatch)) != 0:
            failed.append(f"{arguments}: {code} {capfd.readouterr().err[-300:]}")
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_no_broken_file_ends_in_a_traceback(place, tmp_path, monkeypatch, capfd):
    counts: Counter[str] = Counter()
    faults = []
    count = len(commands(place, tmp_path))
    for seed in range(RUNS):
        rng, at = random.Random(seed), tmp_path / str(seed)
        at.mkdir()
        kind = list(KINDS)[seed // count % len(KINDS)]
        file = at / f"file{rng.choice(SUFFIXES)}"
        KINDS[kind](file, rng)
        command, _ = commands(place, at / "output")[seed % count]
        code = run([str(a).replace("FILE", str(file)) for a in command], monkeypatch)
        shown = capfd.readouterr().err
        complaints = [line for line in shown.splitlines() if line.startswith("memopd: ")]
        if code not in (0, 2) or (code == 2 and len(complaints) != 1) or "Traceback" in shown:
            faults.append(f"{seed} {kind} {[str(a) for a in command]} {file.name}: {str(code)[:300]} {shown[-300:]}")
        counts[f"{name_of(command)}: {'refused' if code == 2 else 'done' if code == 0 else 'FAULT'}"] += 1
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    assert not faults, "\n".join(faults)
    assert sum(counts.values()) == RUNS
