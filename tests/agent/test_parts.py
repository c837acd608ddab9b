"""Parts by their names: what each may ask for, and one line for every mistake, before anything is opened."""

import sys

import pytest

from memopd.agent import SearchEnvironment
from memopd.agent.memory import Mem1, Refresh, Window
from memopd.agent.parts import build_parts, check_parts
from memopd.config import TasksConfig
from memopd.tasks import Question, Task

THEIRS = """
class Rule:
    def __init__(self, codec, tokenizer, size=1):
        self.codec, self.tokenizer, self.size = codec, tokenizer, size

    def context(self, turns):
        return []

class Greedy(Rule):
    def __init__(self, codec, money): ...

class Searching(Rule):
    def __init__(self, index): self.index = index

class World:
    '''Needs no index.'''

    def __init__(self, reward, grading, topk, price=3, index=None):
        self.reward, self.grading, self.topk, self.price, self.index = reward, grading, topk, price, index

    def start(self, task): ...
    def step(self, live): ...
    def grade(self, task, responses): ...

class Half:
    def start(self, task): ...

class Library(World):
    def __init__(self, index, teleport): ...

def count(task, responses):
    return len(responses)

number = 3
"""


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    (tmp_path / "their_parts.py").write_text(THEIRS)
    (tmp_path / "their_broken_parts.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_parts", None)


class Nothing:
    def search(self, queries, k):
        return [[] for _ in queries]


def tokenizer(text, add_special_tokens):
    return {"input_ids": [ord(c) for c in text]}


def test_the_built_in_parts_go_through_the_same_seam():
    index = Nothing()
    environment, memory = build_parts(TasksConfig(topk=5, reward="f1", grading="mem1"), tokenizer, index)
    assert isinstance(environment, SearchEnvironment)
    assert isinstance(memory, Mem1)
    assert (environment.index, environment.topk, environment.grading) == (index, 5, "mem1")
    task = Task("t", (Question("0", "Who?", ("Ann Bee",)),))
    assert environment.grade(task, ["<answer>Ann</answer>"]).reward == pytest.approx(2 / 3)
    assert build_parts(TasksConfig(memory="window:3"), tokenizer, index)[1] == Window(3)
    refresh = build_parts(TasksConfig(memory="refresh"), tokenizer, index)[1]
    assert isinstance(refresh, Refresh)
    assert refresh.codec.encode("ab").tolist() == [97, 98]


def test_users_parts_get_what_they_ask_for():
    theirs = {"environment": "their_parts:World", "reward": "their_parts:count", "topk": 7}
    named = TasksConfig(**theirs, memory="their_parts:Rule")
    check_parts(named)  # no index: nobody needs one
    environment, memory = build_parts(named, tokenizer)
    assert (environment.topk, environment.price, environment.grading, environment.index) == (7, 3, "squad", None)
    assert environment.reward(None, ["a", "b"]) == 2.0
    assert (memory.tokenizer, memory.size) == (tokenizer, 1)
    assert memory.codec.encode("b").tolist() == [98]
    assert build_parts(TasksConfig(**theirs, memory="their_parts:Rule:4"), tokenizer)[1].size == 4
    index = Nothing()
    environment, memory = build_parts(TasksConfig(**theirs, memory="their_parts:Searching"), tokenizer, index)
    assert environment.index is memory.index is index


def test_turns_and_a_prompt_reach_an_environment_that_takes_them(tmp_path):
    (tmp_path / "prompt.txt").write_text("Say it: {questions}")
    named = TasksConfig(turns=6, prompt=str(tmp_path / "prompt.txt"))
    environment, _ = build_parts(named, tokenizer, Nothing())
    assert (environment.turns, environment.prompt) == (6, "Say it: {questions}")
    ours, _ = build_parts(TasksConfig(), tokenizer, Nothing())
    assert (ours.turns, ours.prompt) == (SearchEnvironment(Nothing()).turns, SearchEnvironment(Nothing()).prompt)
    for setting, value in (("turns", 6), ("prompt", str(tmp_path / "prompt.txt"))):
        wrong = TasksConfig(environment="their_parts:World", **{setting: value})
        with pytest.raises(ValueError, match=f"^tasks.{setting}: the environment 'their_parts:World' has no parameter"):
            check_parts(wrong)


def test_an_index_is_opened_only_for_who_asks_for_it():
    """Both name a folder that is not there."""
    named = TasksConfig(index="/nowhere", environment="their_parts:World")
    with pytest.raises(ValueError, match="/nowhere"):
        build_parts(named, tokenizer)
    check_parts(named)
    sys.modules["their_parts"].World.__init__ = lambda self, topk: None
    build_parts(named, tokenizer)


@pytest.mark.parametrize(
    ("setting", "name", "line"),
    [
        ("memory", "mem2", "'mem2' is not one of mem1, .*; write module:name for your own"),
        ("memory", "their_part:Rule", "No module named 'their_part'; put its folder in PYTHONPATH, or run from it"),
        ("memory", "their_broken_parts:Rule", "No module named 'no_such_thing'"),
        ("memory", "their_parts:Rules", "module 'their_parts' has no 'Rules'"),
        ("memory", "their_parts:number", "must be a class with context, got int"),
        ("memory", "their_parts:World", "must be a class with context; it has no context"),
        ("memory", "their_parts:Greedy", "needs money; available: codec, tokenizer, index; rename the parameter"),
        ("memory", "their_parts:Searching:2", "the memory rule 'their_parts:Searching' takes no size"),
        ("environment", "searching", "'searching' is not one of search; write module:name for your own"),
        ("environment", "their_part:World", "No module named 'their_part'"),
        ("environment", "their_parts:Worlds", "module 'their_parts' has no 'Worlds'"),
        ("environment", "their_parts:number", "must be a class with start, step, grade, got int"),
        ("environment", "their_parts:Half", "must be a class with start, step, grade; it has no step, grade"),
        ("environment", "their_parts:Library", "needs teleport; available: index, topk, reward, grading"),
        ("reward", "precision", "'precision' is not one of em, f1, em_partial; write module:name for your own"),
        ("reward", "their_parts:sum", "module 'their_parts' has no 'sum'"),
        ("reward", "their_parts:number", "must be a function, got int"),
        ("reward", "their_parts:Greedy", r"must be a function of \(task, responses\)"),  # though it takes two
        ("reward", "memopd.tasks.grading:normalise", r"must be a function of \(task, responses\)"),
    ],
)
def test_a_wrong_name_is_one_line(setting, name, line):
    wrong = TasksConfig(index="/nowhere", **{setting: name})
    for flag in ("tasks.", "--"):
        with pytest.raises(ValueError, match=f"^{flag}{setting}: .*{line}") as raised:
            check_parts(wrong, flag=flag)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("named", [{}, {"environment": "their_parts:World", "memory": "their_parts:Searching"}])
def test_who_needs_an_index_says_so(named):
    with pytest.raises(ValueError, match=r"^tasks\.index: name an index folder or the URL of a retrieval service"):
        check_parts(TasksConfig(**named))
    check_parts(TasksConfig(**named), needs_index=False)  # nothing will be sampled
    check_parts(TasksConfig(**named, index="/nowhere"))
