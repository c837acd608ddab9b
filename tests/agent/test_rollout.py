"""Rollouts: exact ids, segments, seeds, ends; a scripted engine in a scripted environment."""

from types import SimpleNamespace

import numpy as np
import pytest

from memopd.agent.environment import Observation, Outcome
from memopd.agent.memory import Mem1
from memopd.agent.rollout import call_seed, episode_seed, repeat, rollout
from memopd.engine import Completion
from memopd.tasks import Question, Task
from memopd.types import Sampling, Segment, StopReason


class Letters:
    """A tokenizer of one id per character."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"[{messages[0]['content']}]"


class Counts:
    """Says its request's seed modulo 10, `length` times."""

    def __init__(self):
        self.requests = []

    def generate(self, requests):
        self.requests += requests
        return [
            Completion(np.full(3, 48 + r.seed % 10, np.int32), np.full(3, -0.5), StopReason.STOP, policy_version=7)
            for r in requests
        ]


class Rounds:
    """As many calls as the task has questions; observations 'o0', 'o1', ..."""

    def start(self, task):
        return Observation(task.id, ("!",))

    def step(self, live):
        return [
            Observation(f"o{len(p.responses) - 1}", ("?",), reward=0.25)
            if len(p.responses) < p.task.k
            else Observation(None, reward=0.5)
            for p in live
        ]

    def grade(self, task, responses):
        return Outcome(float(len(responses)))


def tasks(*sizes):
    return [Task(f"t{i}", tuple(Question(str(n), "q", ("a",)) for n in range(k))) for i, k in enumerate(sizes)]


def run(pairs, engine=None, **rest):
    options = {"sampling": Sampling(), "seed": 0, "batch": 2, "rule": "mem1"} | rest
    return list(rollout(engine or Counts(), Rounds(), Mem1(), Letters(), pairs, **options))


def text(ids):
    return "".join(map(chr, ids))


def test_every_call_is_what_was_read_and_sampled():
    engine = Counts()
    [episode] = run(repeat(tasks(3)), engine)
    said = [text(c.completion) for c in episode.calls]
    assert [text(c.prompt) for c in episode.calls] == ["[t0]", f"[t0]{said[0]}o0", f"[t0]{said[1]}o1"]
    assert episode.calls[0].segments == (Segment("prefix", 0, 4),)
    assert episode.calls[2].segments == (
        Segment("prefix", 0, 4),
        Segment("memory", 4, 7, source=1),
        Segment("observation", 7, 9, source=1),
    )
    assert [c.reward for c in episode.calls] == [0.25, 0.25, 0.5]
    assert (episode.reward, episode.memory, episode.task_id) == (3.0, "mem1", "t0")
    assert {c.policy_version for c in episode.calls} == {7}
    assert episode.calls[0].logprobs.tolist() == [-0.5] * 3
    assert [r.stop for r in engine.requests] == [("!",), ("?",), ("?",)]
    assert episode.started <= episode.ended


def test_episodes_do_not_depend_on_what_runs_beside_them():
    pairs = list(repeat(tasks(1, 3, 2, 4, 1), samples=2))
    by_batch = [{e.id: e.calls for e in run(pairs, batch=b)} for b in (1, 3, 10)]
    assert by_batch[0] == by_batch[1] == by_batch[2]
    assert len(by_batch[0]) == 10
    assert by_batch[0] != {e.id: e.calls for e in run(pairs, seed=1)}


def test_seeds_differ_by_run_episode_and_turn():
    seeds = {call_seed(episode_seed(run, name), turn) for run in (0, 1) for name in "ab" for turn in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_finished_place_goes_to_the_next_task():
    engine = Counts()
    sizes = []

    class Watching:
        def generate(self, requests):
            sizes.append(len(requests))
            return engine.generate(requests)

    assert len(run(repeat(tasks(1, 4, 1, 1)), Watching())) == 4
    assert sizes == [2, 2, 2, 1]


def test_a_context_without_room_ends_the_episode():
    [episode] = run(repeat(tasks(5)), max_context=9)
    assert len(episode.calls) == 1  # q of 4, a response of 3 and an observation of 2 leave no room
    assert episode.reward == 1.0
    assert len(run(repeat(tasks(5)), max_context=10)[0].calls) == 5


def test_a_task_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"has 4 tokens, and max_context is 4: raise it, or leave the task out"):
        run(repeat(tasks(1)), max_context=4)


def test_an_environment_must_begin():
    environment = SimpleNamespace(start=lambda task: Observation(None))
    with pytest.raises(ValueError, match="gave no text"):
        list(rollout(Counts(), environment, Mem1(), Letters(), repeat(tasks(1)), Sampling(), 0))
