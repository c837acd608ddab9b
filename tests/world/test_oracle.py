"""Scripted policies through the real index."""

import re

import numpy as np
import pytest

from memopd.agent import Agent, Ask, Piece, SearchEnvironment, repeat
from memopd.agent.codec import codec_of
from memopd.agent.memory import RULES, Mem1
from memopd.tasks import Question, Task
from memopd.world.demonstrations import demonstrate
from memopd.world.encyclopedia import tasks
from memopd.world.oracle import Guesser, Oracle


@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_oracle_solves_everything_at_20_000_passages(large, k):
    asked = tasks(large.world, k, "test")[: 400 // k]
    episodes = list(demonstrate(asked, large.index, large.tokenizer, "mem1"))
    assert [e.reward for e in episodes] == [float(k)] * len(asked)
    assert [e.task_id for e in episodes] == [t.id for t in asked]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "amem"])  # it needs an embedding model
def test_oracle_under_every_memory_rule(small, rule):
    asked = tasks(small.world, 2, "dev")[:20]
    episodes = list(demonstrate(asked, small.index, small.tokenizer, rule))
    found = np.mean([e.reward for e in episodes])
    assert found == 2.0 or rule == "refresh"  # refresh searches for its summary too, and may miss a passage
    assert found > 1.5
    assert {e.memory for e in episodes} == {rule}


def test_every_response_carries_what_the_next_one_needs(small):
    """Under mem1 nothing older survives: every fact found so far must stand in the last response."""
    asked = tasks(small.world, 8, "dev")[:5]
    decode = codec_of(small.tokenizer).decode
    for task, episode in zip(asked, demonstrate(asked, small.index, small.tokenizer, "mem1"), strict=True):
        answers = [q.answers[0] for q in task.questions]
        last = decode(episode.calls[-1].completion)
        assert last.endswith(f"<answer>{'; '.join(answers)}</answer>")
        summary = last.partition("</think>")[0]
        assert all(a in summary for a in answers)


def test_reasoning_varies(small):
    asked = tasks(small.world, 2, "train")[:40]
    decode = codec_of(small.tokenizer).decode
    thinks = [decode(e.calls[0].completion) for e in demonstrate(asked, small.index, small.tokenizer, "mem1")]
    assert len({re.sub(r"<search>.*", "", t) for t in thinks}) > 5


def test_oracle_believes_only_what_it_read(small):
    """An index that finds nothing leaves it without answers."""

    class Nothing:
        def search(self, queries, k):
            return [[] for _ in queries]

    episodes = list(demonstrate(tasks(small.world, 2, "dev")[:5], Nothing(), small.tokenizer, "mem1"))
    assert [e.reward for e in episodes] == [0.0] * 5


def test_a_careless_oracle_keeps_to_the_protocol_and_is_wrong_as_often_as_it_should_be(small):
    pairs = list(repeat(tasks(small.world, 8, "train")[:40]))
    oracle = Oracle(pairs, small.tokenizer, misreads=0.25)
    agent = Agent(oracle, SearchEnvironment(small.index), Mem1(), small.tokenizer, max_context=8192)
    episodes = list(agent.play(pairs))
    asked = [q for _, task in pairs for q in task.questions]
    expected = sum(0.75 ** len(q.steps) for q in asked)  # a fact for every step, each read right three times in four
    right, spread = sum(e.reward for e in episodes), np.sqrt(len(asked) / 4)
    assert abs(right - expected) < 3 * spread
    decode = codec_of(small.tokenizer).decode
    assert all(len(decode(e.calls[-1].completion).split("<answer>")[1].split("; ")) == 8 for e in episodes)


def test_oracle_needs_steps(small):
    task = Task("t", (Question("q", "Who?", ("Ann",)),))
    with pytest.raises(ValueError, match="cannot solve question 'q'"):
        list(demonstrate([task], small.index, small.tokenizer, "mem1"))


def test_guesses_need_no_steps(small):
    """Published sets have comparisons, too, but not the searches that answer them."""
    pairs = [("t", Task("t", (Question("q", "Which is longer, the Velm or the Oder?", ("Oder",), "comparison"),)))]
    guesser = Guesser(pairs, small.tokenizer, [Question("0", "Which is longer?", ("the Oder",))])
    agent = Agent(guesser, SearchEnvironment(small.index), Mem1(), small.tokenizer)
    assert [e.reward for e in agent.play(pairs)] == [1.0]


def test_who_never_searches_scores_nothing(large):
    known = large.world.questions["train"]
    for kind in ("one-hop", "bridge", "comparison"):
        asked = [Task(q.id, (q,)) for q in large.world.questions["test"] if q.kind == kind][:500]
        pairs = list(repeat(asked))
        guesser = Guesser(pairs, large.tokenizer, known[:2000])
        agent = Agent(guesser, SearchEnvironment(large.index), Mem1(), large.tokenizer, batch=500)
        score = np.mean([e.reward for e in agent.play(pairs)])
        # Chance, with three standard errors of 500 coins.
        assert score <= 0.5 + 3 * 0.5 / 500**0.5 if kind == "comparison" else score < 0.02


def test_oracle_is_reproducible(small):
    asked = tasks(small.world, 2, "dev")[:10]
    a, b, c = ([e.calls for e in demonstrate(asked, small.index, small.tokenizer, "mem1", seed)] for seed in (0, 0, 1))
    assert a == b
    assert a != c


def test_oracle_is_an_engine_for_any_batch(small):
    pairs = list(repeat(tasks(small.world, 2, "dev")[:12]))
    runs = []
    for batch in (1, 5, 12):
        oracle = Oracle(pairs, small.tokenizer)
        agent = Agent(oracle, SearchEnvironment(small.index), Mem1(), small.tokenizer, batch=batch)
        runs.append({e.id: e.calls for e in agent.play(pairs)})
    assert runs[0] == runs[1] == runs[2]


def test_the_oracle_answers_a_memory_that_asks_and_goes_on(small):
    """Notes of what it knows; the notes change none of its actions."""

    class Noting(Mem1):
        def context(self, turns):
            note = yield Ask("What do you know?", purpose="note")
            return [Piece(note.ids, "memory", note.call), *super().context(turns)]

    pairs = list(repeat(tasks(small.world, 2, "dev")[:8]))
    runs = []
    for memory in (Mem1(), Noting()):
        agent = Agent(Oracle(pairs, small.tokenizer), SearchEnvironment(small.index), memory, small.tokenizer)
        runs.append({e.id: e for e in agent.play(pairs)})
    plain, noting = runs
    for id, episode in noting.items():
        assert episode.reward == 2.0
        assert [c.completion.tolist() for c in episode.actions] == [c.completion.tolist() for c in plain[id].calls]
        notes = [small.tokenizer.decode(c.completion.tolist()) for c in episode.calls if c.purpose]
        assert len(notes) == len(episode.actions) - 1
        assert not any("<search>" in note for note in notes)
