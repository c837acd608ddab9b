"""Examples run, and do what the guides say they do; what the guides quote of them is theirs."""

import json
import os
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
from safetensors.torch import load_file
from train import command
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd.agent import Agent, SearchEnvironment, repeat
from memopd.agent.memory import Mem1
from memopd.engine.local import LocalEngine
from memopd.gateway.server import create_app
from memopd.record import import_calls, read_episodes, write_episodes
from memopd.retrieval import open_index
from memopd.tasks.files import read_tasks, write_tasks
from memopd.tasks.grading import grade, reward_of
from memopd.train.traces import read_traces
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


# ---- parts of your own, through the command line


def memopd(*arguments):
    """The command where the examples' first lines call it: from the root, with the examples on the path."""
    ended = command.memopd(*arguments, environment={"CUDA_VISIBLE_DEVICES": ""}, before=from_the_root)
    assert ended.code == 0, ended.err
    return ended.out


def from_the_root():
    os.chdir(ROOT)
    sys.path.insert(0, str(EXAMPLES))


def scripted(world, k=2):
    tasks = world / "tasks" / f"train-q{k}.parquet"
    return [tasks, "--policy", "oracle", "--tokenizer", world / "tokenizer", "--index", world / "index", "--limit", 4]


@pytest.fixture
def train(world, tmp_path):
    """Two updates of the shipped student with a part of one's own; the episodes of both."""

    def trained(*settings):
        memopd(
            "train", "configs/quickstart.toml", "--output", tmp_path / "run", "--teacher.state", "none",
            "--tasks.train", world / "tasks/train-q1.parquet", "--tasks.index", world / "index",
            "--optimise.steps", 2, "--optimise.tasks", 2, "--optimise.samples", 2, *settings,
        )  # fmt: skip
        start, end = (load_file(folder / "model.safetensors") for folder in (STUDENT, tmp_path / "run" / "model"))
        assert any((start[name] != end[name]).any() for name in start)
        steps = [list(read_episodes(f)) for f in sorted((tmp_path / "run" / "episodes").glob("step-*.parquet"))]
        assert [len(episodes) for episodes in steps] == [4, 4]
        return [episode for episodes in steps for episode in episodes]

    return trained


def kept(call):
    return [(s.kind, s.source) for s in call.segments]


def test_own_memory_samples(world, tmp_path):
    memopd("rollout", *scripted(world), "--memory", "own_memory:LastTwo", "-o", tmp_path / "e")
    episodes = list(read_episodes(tmp_path / "e"))
    assert {e.memory for e in episodes} == {"own_memory:LastTwo"}
    longest = max(episodes, key=lambda e: len(e.calls))
    assert len(longest.calls) >= 4
    a, b, read = longest.calls[1], longest.calls[2], longest.calls[3].prompt.tolist()
    assert kept(longest.calls[3]) == [("prefix", None), ("memory", 1), ("memory", 2), ("observation", 2)]
    said = [*a.completion.tolist(), *b.completion.tolist()]
    start = longest.calls[3].segments[0].stop
    assert read[start : start + len(said)] == said


@pytest.mark.slow  # the next test trains another memory of the same file
def test_own_memory_is_trained(train):
    episodes = train("--tasks.memory", "own_memory:LastTwo")
    later = [(t, call) for e in episodes for t, call in enumerate(e.calls) if t >= 2]
    assert later
    for t, call in later:
        assert kept(call) == [("prefix", None), ("memory", t - 2), ("memory", t - 1), ("observation", t - 1)]


def test_a_memory_that_writes_notes_is_trained(train, tmp_path):
    """Notes are calls of the policy's: recorded with their purpose, read by later actions, and trained on."""
    episodes = train("--tasks.memory", "own_memory:Notes", "--tasks.reward", "own_reward:brief")
    noted = [e for e in episodes if len(e.actions) > 1]
    assert noted
    for episode in noted:
        action, note, after = episode.calls[:3]
        assert [c.purpose for c in (action, note, after)] == ["", "note", ""]
        assert len(note.completion) <= 24
        assert kept(after) == [("prefix", None), ("memory", 1), ("observation", 0)]
        memory = after.segments[1]
        assert after.prompt[memory.start : memory.stop].tolist() == note.completion.tolist()
    traces = {
        key: trace
        for file in (tmp_path / "run" / "traces").glob("step-*.parquet")
        for key, trace in read_traces(file).items()
    }
    taught = [trace for trace in traces.values() if (trace.episode, trace.call) in {(e.id, 1) for e in noted}]
    assert taught
    assert any(trace.advantage.any() for trace in taught)


def test_own_environment_samples_and_evaluates(world, tmp_path):
    priced = ["--environment", "own_environment:PricedSearch"]
    memopd("rollout", *scripted(world), *priced, "-o", tmp_path / "e")
    for episode in read_episodes(tmp_path / "e"):
        assert_priced(episode)
        assert episode.reward == 2.0
    found = json.loads(memopd("evaluate", *scripted(world), *priced, "--json"))
    assert found["results"][0]["metrics"]["em"]["mean"] == 2.0


def test_own_environment_is_trained(train):
    episodes = train("--tasks.environment", "own_environment:PricedSearch")
    assert any(len(e.calls) > 2 for e in episodes)
    for episode in episodes:
        assert_priced(episode)


def assert_priced(episode):
    searches = len(episode.calls) - 1
    assert [c.reward for c in episode.calls] == pytest.approx([-0.02 * (t + 1) for t in range(searches)] + [0.0])


def test_own_reward_samples(world, tmp_path):
    memopd("rollout", *scripted(world), "--reward", "own_reward:brief", "-o", tmp_path / "e")
    decode = AutoTokenizer.from_pretrained(world / "tokenizer").decode
    for episode in read_episodes(tmp_path / "e"):
        said = sum(len(decode(c.completion.tolist())) for c in episode.calls)
        assert episode.reward == pytest.approx(2.0 - 0.0005 * said)


def test_own_reward_has_a_name(world, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    task = read_tasks(world / "tasks/train-q2.parquet")[0]
    right = "<answer>" + "; ".join(q.answers[0] for q in task.questions) + "</answer>"
    assert grade(task.questions, right).em == 2.0
    assert reward_of("own_reward:brief")(task, [right]) == pytest.approx(2.0 - 0.0005 * len(right))
    assert reward_of("own_reward:brief")(task, ["x" * 100, right]) == pytest.approx(1.95 - 0.0005 * len(right))


# ---- loops of your own


def test_own_loop_learns_from_the_teacher(world, oracle, tmp_path, monkeypatch, capsys):
    _, pairs, _ = oracle
    words = AutoTokenizer.from_pretrained(STUDENT)
    agent = Agent(Oracle(pairs, words, 0), SearchEnvironment(open_index(world / "index")), Mem1(), words)
    write_episodes(tmp_path / "e.parquet", agent.play(pairs[:2]))
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
PEFT = "from peft import PeftModel"  # tests/models/test_adapters.py does the same
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_guides_quote_what_is_there(guide):
    examples = [p.read_text() for p in EXAMPLES.glob("*.py")]
    for block in BLOCK.findall(guide.read_text()):
        if block.startswith((SELF_CONTAINED, "report =", PEFT)):
            continue
        lines = [line.split("  #")[0].strip() for line in block.splitlines()]
        assert any(all(line in text for line in lines if line != "...") for text in examples), block


def test_the_log_of_the_audit_guide_can_be_imported(oracle, world, tmp_path, monkeypatch):
    engine, pairs, tokenizer = oracle
    agent = Agent(engine, SearchEnvironment(open_index(world / "index")), Mem1(), tokenizer)
    made = [
        replace(e, calls=tuple(replace(c, logprobs=[-1.0] * len(c.completion)) for c in e.calls))  # an oracle has none
        for e in agent.play(pairs[:2])
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
