"""world, rollout, evaluate and audit through the command line, on one small world."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from transformers import AutoTokenizer

from memopd import cli
from memopd.agent.memory import RULES
from memopd.files import digest
from memopd.record import read_episodes
from memopd.tasks.files import read_tasks
from memopd.verify.families import tiny_model

SETS = [f"{split}-q{k}" for split in ("train", "dev", "test") for k in (1, 2, 8, 16)]


def memopd(*arguments, status=0):
    """The command line in this process: importing torch once is enough."""
    said = {name: io.StringIO() for name in ("stdout", "stderr")}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said["stdout"]), redirect_stderr(said["stderr"]):
        patch.setattr(sys, "argv", ["memopd", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert (left.value.code or 0) == status, said["stderr"].getvalue()
    return said["stdout" if status == 0 else "stderr"].getvalue()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "world"
    memopd("world", folder, "--passages", 400, "--episodes", 6)
    return folder


@pytest.fixture(scope="module")
def scripted(world):
    return ["--index", world / "index", "--tokenizer", world / "tokenizer", "--policy", "oracle"]


def test_world_writes_everything(world):
    assert (world / "corpus.jsonl").is_file()
    assert sorted(p.stem for p in (world / "tasks").iterdir()) == sorted(SETS)
    for split in ("train", "dev"):
        for rule in ("mem1", "full_response", "truncate"):
            episodes = list(read_episodes(world / "oracle" / split / rule / "q2.parquet"))
            assert [e.reward for e in episodes] == [2.0] * 6
            assert {e.memory for e in episodes} == {rule}
    assert not (world / "oracle" / "test").exists()


def test_a_world_to_be_trained_in_needs_no_demonstrations(world, tmp_path):
    memopd("world", tmp_path / "bare", "--passages", 400, "--episodes", 0)
    assert sorted(p.name for p in (tmp_path / "bare").iterdir()) == ["corpus.jsonl", "index", "tasks", "tokenizer"]
    file = "tasks/dev-q2.parquet"
    assert read_tasks(tmp_path / "bare" / file) == read_tasks(world / file)
    assert "--episodes" in memopd("world", tmp_path / "none", "--episodes", -1, status=2)


@pytest.mark.parametrize("topk", [1, 5])
def test_a_search_finds_so_many_documents(topk, world, scripted, tmp_path):
    tasks = world / "tasks" / "dev-q1.parquet"
    memopd("rollout", tasks, "-o", tmp_path / "store", "--limit", 4, "--topk", topk, *scripted)
    decode = AutoTokenizer.from_pretrained(world / "tokenizer").decode
    read = [decode(c.prompt) for e in read_episodes(tmp_path / "store") for c in e.calls[1:]]
    assert read
    assert all(text.count("(Title: ") == topk for text in read)


def test_world_is_deterministic_and_refuses_to_overwrite(world, tmp_path):
    memopd("world", tmp_path / "again", "--passages", 400, "--episodes", 6)
    for name in ("corpus.jsonl", "tokenizer/tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (world / name).read_bytes()
    for name in SETS:
        file = f"tasks/{name}.parquet"
        assert read_tasks(tmp_path / "again" / file) == read_tasks(world / file)
    a, b = (list(read_episodes(w / "oracle/train/mem1/q8.parquet")) for w in (world, tmp_path / "again"))
    assert [e.calls for e in a] == [e.calls for e in b]
    assert "already exists" in memopd("world", world, status=2)


def test_rollout_goes_on_where_it_stopped(world, scripted, tmp_path):
    tasks, store = world / "tasks/dev-q2.parquet", tmp_path / "episodes"
    memopd("rollout", tasks, *scripted, "-o", store, "--limit", 3)
    said = json.loads(memopd("rollout", tasks, *scripted, "-o", store, "--limit", 5, "--json"))
    whole = memopd("rollout", tasks, *scripted, "-o", tmp_path / "whole", "--limit", 5)
    calls = [c for e in read_episodes(store) for c in e.calls]
    sampled = sum(len(c.completion) for c in calls)
    counted = {"episodes": 5, "calls": len(calls), "sampled_tokens": sampled, "mean_reward": 2.0}
    assert said == {"output": str(store), **counted}  # of the whole store, not of what was added; the oracle is right
    assert f"5 episodes, {len(calls)} calls, {sampled:,} sampled tokens, mean reward 2.000" in whole
    found = [{e.id: e.calls for e in read_episodes(path)} for path in (store, tmp_path / "whole")]
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert len(list(store.glob("*.parquet"))) == 2


def test_samples_of_a_task_are_a_group(world, scripted, tmp_path):
    memopd("rollout", world / "tasks/dev-q1.parquet", *scripted, "-o", tmp_path / "e", "--limit", 2, "--samples", 3)
    episodes = list(read_episodes(tmp_path / "e"))
    assert len({e.id for e in episodes}) == 6
    assert len({e.task_id for e in episodes}) == 2


def test_evaluate(world, scripted, tmp_path):
    files = [world / f"tasks/dev-q{k}.parquet" for k in (1, 2)]
    common = ["--limit", 10, "--index", world / "index", "--tokenizer", world / "tokenizer"]
    known = ["--policy", "guess", "--train", world / "tasks/train-q1.parquet"]
    memopd("evaluate", *files, *common, *known, "-o", tmp_path / "guess.json")
    shown = memopd("evaluate", *files, *common, "--policy", "oracle", "--against", tmp_path / "guess.json")
    for word in ("Q1 EM", "Q2 F1", "peak", "dependency", "time", "grading squad", "minus guess", "paired bootstrap"):
        assert word in shown
    said = memopd("evaluate", *files, *common, *known, "-o", tmp_path / "guess.json", status=2)
    assert "guess.json: already exists; choose another name, or remove it" in said
    found = json.loads(memopd("evaluate", *files, *common, "--policy", "oracle", "--json", "--grading", "mem1"))
    assert [r["metrics"]["em"]["mean"] for r in found["results"]] == [1.0, 2.0]
    assert found["results"][0]["setting"]["grading"] == "mem1"
    assert len(found["tasks"][0][0]) == 10


def test_a_comparison_that_cannot_be_made_is_refused_before_anything_is_sampled(world, scripted, tmp_path, monkeypatch):
    tasks, other = world / "tasks/dev-q1.parquet", tmp_path / "other.json"
    memopd("evaluate", tasks, *scripted, "--limit", 2, "-o", other)
    monkeypatch.setattr("memopd.cli.rollout.played", lambda *_: pytest.fail("it was sampled"))
    for options, why in (
        ([tasks, "--limit", 2, "--against", tmp_path / "none.json"], "no such file"),
        ([tasks, "--limit", 3, "--against", other], "has results of other tasks than"),
        (
            [world / "tasks/dev-q2.parquet", "--limit", 2, "--against", other],
            "give the same tasks and the same --limit",
        ),
        ([tasks, tasks, "--limit", 2, "--against", other], "has results of 1 task files, and 2 are given"),
    ):
        assert why in " ".join(memopd("evaluate", *options, *scripted, status=2).split())


def test_a_protocol_reaches_a_rollout_and_an_option_wins(world, scripted, tmp_path):
    """The oracle needs at least a turn per question: with six turns it cannot know eight answers."""
    (tmp_path / "mine.txt").write_text("My own words. {questions}")
    protocol = ["--protocol", "mem1", "--prompt", tmp_path / "mine.txt"]
    found = {}
    nine = [*protocol, "--turns", 9, "--top-p", 0.95]
    for name, options in {"ours": [], "six": protocol, "nine": nine}.items():
        memopd("rollout", world / "tasks/dev-q8.parquet", *scripted, "-o", tmp_path / name, "--limit", 2, *options)
        found[name] = list(read_episodes(tmp_path / name))
    assert [e.reward for e in found["ours"]] == [8.0, 8.0]
    assert [len(e.calls) for e in found["six"]] == [6, 6]
    assert [len(e.calls) for e in found["nine"]] == [9, 9]
    assert [found[name][0].sampling.top_p for name in found] == [1.0, 1.0, 0.95]  # a rollout samples as training does
    assert all(a.reward < b.reward < 8 for a, b in zip(found["six"], found["nine"], strict=True))
    decode = AutoTokenizer.from_pretrained(world / "tokenizer").decode
    assert ["My own words. " in decode(found[name][0].calls[0].prompt) for name in found] == [False, True, True]


def test_a_protocol_reaches_an_evaluation(world, scripted):
    given = ["--protocol", "mem1", "--limit", 2, "--json", "--max-tokens", 50]
    shown = json.loads(memopd("evaluate", world / "tasks/dev-q1.parquet", *scripted, *given))
    assert shown["results"][0]["setting"]["grading"] == "mem1"
    used = shown["provenance"]["settings"]
    assert (used["turns"], used["reward"], used["temperature"], used["top_p"]) == (6, "em_partial", 0.01, 0.95)
    assert used["max_tokens"] == 50


def test_results_know_what_they_are_of(world, scripted, tmp_path, caplog):
    tasks = tmp_path / "tasks.parquet"
    tasks.write_bytes((world / "tasks/dev-q1.parquet").read_bytes())
    options = [tasks, *scripted, "--limit", 2, "--memory", "window:3"]
    memopd("evaluate", *options, "-o", tmp_path / "a.json")
    made = json.loads((tmp_path / "a.json").read_text())["provenance"]
    assert made["inputs"]["tasks"] == [{"path": str(tasks), "sha256": digest(tasks)}]
    assert made["inputs"].keys() == {"tasks", "tokenizer", "index"}
    assert (made["settings"]["memory"], made["settings"]["seeds"]) == ("window:3", 1)
    assert made["command"].startswith("memopd evaluate ")
    memopd("evaluate", *options, "--against", tmp_path / "a.json")
    assert not caplog.messages
    tasks.write_bytes((world / "tasks/dev-q2.parquet").read_bytes())
    memopd("evaluate", world / "tasks/dev-q1.parquet", *options[1:], "--against", tmp_path / "a.json")
    assert [m for m in caplog.messages if "has changed" in m] == [
        f"{tmp_path / 'a.json'}: {tasks} has changed since: these results are of another version of it"
    ]


def test_a_store_has_episodes_of_one_making(world, scripted, tmp_path):
    words, store = tmp_path / "mine.txt", tmp_path / "store"
    words.write_text("Mine. {questions}")
    given = ["rollout", world / "tasks/dev-q1.parquet", *scripted, "-o", store, "--limit", 1, "--prompt", words]
    memopd(*given)
    memopd(*given, "--limit", 2)
    made = json.loads((store / "rollout.json").read_text())
    assert made["inputs"]["prompt"] == {"path": str(words), "sha256": digest(words)}
    said = memopd(*given, "--reward", "f1", status=2)
    assert "has episodes made with --reward em: choose another store" in " ".join(said.split())
    other = tmp_path / "other"
    shutil.copytree(world / "index", other)
    memopd(*given, "--index", other)  # the same index elsewhere
    info = json.loads((other / "memopd-index.json").read_text())
    (other / "memopd-index.json").write_text(json.dumps(info | {"corpus_sha256": "0" * 64}))
    said = memopd(*given, "--index", other, status=2)
    assert "has episodes made with another --index than" in " ".join(said.split())
    words.write_text("Others. {questions}")
    assert "has changed since its episodes were made" in " ".join(memopd(*given, status=2).split())
    assert len(list(read_episodes(store))) == 2


def test_audit_shows_a_row_per_memory_rule(world, scripted, tmp_path):
    """Rollout context equivalence under every rule, the paper's Table 4."""
    from transformers import AutoTokenizer

    rules = [rule for rule in RULES if rule != "amem"]  # it needs an embedding model
    for rule in rules:
        store = tmp_path / rule.replace(":", "-")
        memopd("rollout", world / "tasks/dev-q2.parquet", *scripted, "-o", store, "--limit", 2, "--memory", rule)
    tokenizer = AutoTokenizer.from_pretrained(world / "tokenizer")
    model = tiny_model("qwen2")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    stores = [tmp_path / rule for rule in rules]
    report = json.loads(memopd("audit", *stores, "--model", tmp_path / "model", "--json"))
    assert report["passed"]
    assert [r["memory"] for r in report["rules"]] == rules
    assert all(r["top1"] == 1.0 and r["p99_logprob"] < 1e-4 for r in report["rules"])
    assert report["representations"][0]["p99_logprob"] > 0.1  # flattening is wrong on the same episodes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "mem2"], "--memory: 'mem2' is not one of mem1, full_response,"),
        (["--memory", "nowhere:Rule"], "--memory: 'nowhere:Rule': No module named 'nowhere'"),
        (["--environment", "memopd.agent:Agent"], "must be a class with start, step, grade; it has no start, step"),
        (["--reward", "memopd.tasks.grading:normalise"], "must be a function of (task, responses)"),
        (["--index", ""], "--index: name an index folder"),
        (["--policy", "oracle"], "needs --tokenizer"),
        ([], "give either --model"),
        (["--model", "/nowhere/at/all"], "nowhere"),
    ],
)
def test_errors_say_what_to_do(world, tmp_path, arguments, says):
    options = ["--index", world / "index", "-o", tmp_path / "e"]
    if arguments and arguments[0] not in ("--policy", "--model"):
        options += ["--policy", "oracle", "--tokenizer", "/nowhere"]  # names are resolved before anything is opened
    said = memopd("rollout", world / "tasks/dev-q1.parquet", *options, *arguments, status=2)
    assert says in said
    assert "Traceback" not in said


def test_a_rollout_says_at_its_start_what_training_will_ask(world, tmp_path, caplog):
    options = ["--index", world / "index", "-o", tmp_path / "e", "--model", "/nowhere/at/all"]  # nothing is sampled
    whole = "training cannot use it: sampled with top-p or top-k, not from the whole distribution"
    for changed, said in (
        (["--temperature", 1.0], []),
        (["--temperature", 0.01], ["training can use it only with sampling.temperature = 0.01"]),
        (["--top-p", 0.95], [whole]),
        (["--protocol", "mem1"], []),  # as in training: MEM1's evaluation alone cuts the distribution
    ):
        caplog.clear()
        memopd("rollout", world / "tasks/dev-q1.parquet", *options, *changed, status=2)
        assert [r.getMessage() for r in caplog.records] == [f"{tmp_path / 'e'}: {line}" for line in said]
