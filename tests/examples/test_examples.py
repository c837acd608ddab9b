"""Examples run, and do what the guides say they do; what the guides quote of them is theirs."""

import re
import runpy
import shutil
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd.agent.environment import SearchEnvironment
from memopd.agent.memory import Mem1
from memopd.agent.rollout import repeat, rollout
from memopd.engine.local import LocalEngine
from memopd.gateway.server import create_app
from memopd.record import import_calls, read_episodes, write_episodes
from memopd.retrieval import open_index
from memopd.tasks.files import read_tasks, write_tasks
from memopd.tasks.grading import grade, reward_of
from memopd.types import Sampling
from memopd.world.demonstrations import write_world
from memopd.world.encyclopedia import Difficulty
from memopd.world.oracle import Oracle

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
STUDENT, TEACHER = ROOT / "models" / "student", ROOT / "models" / "teacher"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "world"
    write_world(folder, 400, 0, Difficulty(), 0, lambda _, items: items)
    return folder


@pytest.fixture(scope="module")
def oracle(world):
    """The oracle with its tokenizer and tasks, in the search environment."""
    tokenizer = AutoTokenizer.from_pretrained(world / "tokenizer")
    pairs = list(repeat(read_tasks(world / "tasks" / "train-q2.parquet")[:4]))
    return Oracle(pairs, tokenizer, 0), pairs, tokenizer


def run(name, *arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with suppress(SystemExit):  # a verb's own end; what it left undone, the caller sees
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", ["packed_logprobs.py", "exact_calls.py"])
def test_the_api_in_under_fifty_lines(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(name, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert re.search(r"loss \d", said)
    assert len((EXAMPLES / name).read_text().splitlines()) < 50
    if name == "exact_calls.py":
        assert "packed is what the calls alone are" in said
        run(name, monkeypatch=monkeypatch)  # again, over what is there
        assert len(list(read_episodes("runs/example.parquet"))) == 1


def test_own_memory_is_known_to_every_verb(world, tmp_path, monkeypatch):
    store = tmp_path / "last_two"
    run(
        "own_memory.py", "rollout", world / "tasks/dev-q2.parquet", "--limit", 6, "--memory", "last_two", "-o", store,
        "--index", world / "index", "--policy", "oracle", "--tokenizer", world / "tokenizer",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    episodes = list(read_episodes(store))
    assert {e.memory for e in episodes} == {"last_two"}
    longest = max(episodes, key=lambda e: len(e.calls))
    assert len(longest.calls) >= 4
    a, b, read = longest.calls[1], longest.calls[2], longest.calls[3].prompt.tolist()
    assert [(s.kind, s.source) for s in longest.calls[3].segments] == [
        ("prefix", None),
        ("memory", 1),
        ("memory", 2),
        ("observation", 2),
    ]
    kept = [*a.completion.tolist(), *b.completion.tolist()]
    start = longest.calls[3].segments[0].stop
    assert read[start : start + len(kept)] == kept


def test_own_environment_pays_for_searches(world, oracle):
    engine, pairs, tokenizer = oracle
    own = runpy.run_path(str(EXAMPLES / "own_environment.py"))
    priced = own["PricedSearch"](SearchEnvironment(open_index(str(world / "index"))), price=0.02)
    for episode in rollout(engine, priced, Mem1(), tokenizer, pairs, Sampling(), 0):
        searches = len(episode.calls) - 1
        assert [c.reward for c in episode.calls] == pytest.approx([-0.02 * (t + 1) for t in range(searches)] + [0.0])
        assert episode.reward == 2.0


def test_own_environment_as_a_program(world, tmp_path, monkeypatch):
    write_tasks(tmp_path / "one.parquet", read_tasks(world / "tasks/train-q2.parquet")[:1], lambda task: "")
    run(
        "own_environment.py",
        tmp_path / "one.parquet",
        world / "index",
        STUDENT,
        tmp_path / "e",
        monkeypatch=monkeypatch,
    )
    assert len(list(read_episodes(tmp_path / "e"))) == 4


def test_own_reward_has_a_name(world, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    task = read_tasks(world / "tasks/train-q2.parquet")[0]
    right = "<answer>" + "; ".join(q.answers[0] for q in task.questions) + "</answer>"
    assert grade(task.questions, right).em == 2.0
    assert reward_of("own_reward:brief")(task, [right]) == pytest.approx(2.0 - 0.0005 * len(right))
    assert reward_of("own_reward:brief")(task, ["x" * 100, right]) == pytest.approx(1.95 - 0.0005 * len(right))


def test_own_loop_learns_from_the_teacher(world, oracle, tmp_path, monkeypatch, capsys):
    _, pairs, _ = oracle
    environment = SearchEnvironment(open_index(str(world / "index")))
    student_words = AutoTokenizer.from_pretrained(STUDENT)
    made = rollout(Oracle(pairs, student_words, 0), environment, Mem1(), student_words, pairs[:2], Sampling(), 0)
    write_episodes(tmp_path / "e.parquet", made)
    run("own_loop.py", tmp_path / "e.parquet", STUDENT, TEACHER, monkeypatch=monkeypatch)
    divergence = [float(n) for n in re.findall(r"teacher (\d+\.\d+)", capsys.readouterr().out)]
    assert len(divergence) == 3
    assert divergence[2] < divergence[0]


def test_an_agent_of_the_gateway_is_recorded(world, tmp_path, monkeypatch, capsys):
    write_tasks(tmp_path / "one.parquet", read_tasks(world / "tasks/train-q2.parquet")[:1], lambda task: "")
    model = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
    engine = LocalEngine(model, AutoTokenizer.from_pretrained(STUDENT), slots=8, max_length=1120)
    app = create_app(engine, tmp_path / "store", model="student")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(engine):
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        run("gateway_agent.py", url, tmp_path / "one.parquet", world / "index", monkeypatch=monkeypatch)
        server.should_exit = True
        thread.join()
    assert "4 episodes, mean reward" in capsys.readouterr().out
    episodes = list(read_episodes(tmp_path / "store"))
    assert len({e.task_id for e in episodes}) == 1
    assert len(episodes) == 4


# ---- the guides


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SELF_CONTAINED = "import json\n\nfrom memopd.record import read_episodes"  # run below
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_guides_quote_what_is_there(guide):
    examples = [p.read_text() for p in EXAMPLES.glob("*.py")]
    for block in BLOCK.findall(guide.read_text()):
        if block.startswith((SELF_CONTAINED, "report =")):
            continue
        lines = [line.split("  #")[0].strip() for line in block.splitlines()]
        assert any(all(line in text for line in lines if line != "...") for text in examples), block


def test_the_log_of_the_audit_guide_can_be_imported(oracle, world, tmp_path, monkeypatch):
    engine, pairs, tokenizer = oracle
    environment = SearchEnvironment(open_index(str(world / "index")))
    made = [
        replace(e, calls=tuple(replace(c, logprobs=[-1.0] * len(c.completion)) for c in e.calls))  # an oracle has none
        for e in rollout(engine, environment, Mem1(), tokenizer, pairs[:2], Sampling(), 0)
    ]
    monkeypatch.chdir(tmp_path)
    write_episodes("runs/quickstart/episodes", made)
    block = next(b for b in BLOCK.findall((ROOT / "docs/guides/audit.md").read_text()) if b.startswith(SELF_CONTAINED))
    exec(block, {})
    read = list(import_calls(tmp_path / "runs/calls.jsonl"))
    assert [[c.prompt.tolist() for c in e.calls] for e in read] == [[c.prompt.tolist() for c in e.calls] for e in made]


# ---- the quickstart


@pytest.mark.slow
def test_the_quickstart_ends_with_a_page(tmp_path):
    """In a copy, so that nobody's runs are touched. Twice: the second time the world is kept."""
    for name in ("examples", "configs", "models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    for _ in range(2):
        done = subprocess.run(["sh", "examples/quickstart.sh"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "packing is equivalent to the calls run alone" in done.stdout
        assert re.search(r"EM  [\d.]+ → [\d.]+ of 2: [+-][\d.]+, 95 % interval [+-][\d.]+ to [+-][\d.]+", done.stdout)
        assert (tmp_path / "runs/quickstart/memopd/report.html").stat().st_size > 100_000
    assert "memopd world" not in done.stdout
