"""The agent: exact ids, segments, seeds, ends, and the memory's own calls; a scripted engine and environment."""

from types import SimpleNamespace

import numpy as np
import pytest

from memopd.agent import Agent, Ask, Observation, Outcome, Piece, repeat
from memopd.agent.agent import call_seed, episode_seed
from memopd.agent.memory import Mem1
from memopd.compile import compile_calls, persistent_history
from memopd.engine import Completion
from memopd.evaluate import measure
from memopd.record import read_episodes, write_episodes
from memopd.report.contexts import contexts
from memopd.tasks import Question, Task
from memopd.types import Sampling, Segment, StopReason
from memopd.verify.audit import audit
from memopd.verify.families import tiny_model


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
    """Says its request's seed modulo 10, three times."""

    def __init__(self):
        self.requests, self.sizes = [], []

    def generate(self, requests):
        self.requests += requests
        self.sizes.append(len(requests))
        return [
            Completion(np.full(3, 48 + r.seed % 10, np.int32), np.full(3, -0.5), StopReason.STOP, policy_version=7)
            for r in requests
        ]


class Rounds:
    """As many actions as the task has questions; observations 'o0', 'o1', ..."""

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
        return Outcome(float(len(responses)), em=1.0, f1=0.5, valid=False)


def tasks(*sizes):
    return [Task(f"t{i}", tuple(Question(str(n), "q", ("a",)) for n in range(k))) for i, k in enumerate(sizes)]


def agent(engine=None, memory=None, **rest):
    options = {"sampling": Sampling(), "batch": 2, "rule": "mem1"} | rest
    return Agent(engine or Counts(), Rounds(), memory or Mem1(), Letters(), **options)


def text(ids):
    return "".join(map(chr, ids))


def test_every_call_is_what_was_read_and_sampled():
    engine = Counts()
    [episode] = agent(engine).play(tasks(3), seed=0)
    said = [text(c.completion) for c in episode.calls]
    assert [text(c.prompt) for c in episode.calls] == ["[t0]", f"[t0]{said[0]}o0", f"[t0]{said[1]}o1"]
    assert episode.calls[0].segments == (Segment("prefix", 0, 4),)
    assert episode.calls[2].segments == (
        Segment("prefix", 0, 4),
        Segment("memory", 4, 7, source=1),
        Segment("observation", 7, 9, source=1),
    )
    assert [c.reward for c in episode.calls] == [0.25, 0.25, 0.5]
    assert (episode.id, episode.reward, episode.memory, episode.task_id) == ("t0", 3.0, "mem1", "t0")
    assert {c.policy_version for c in episode.calls} == {7}
    assert episode.calls[0].logprobs.tolist() == [-0.5] * 3
    assert [r.stop for r in engine.requests] == [("!",), ("?",), ("?",)]
    assert [r.seed for r in engine.requests] == [call_seed(episode_seed(0, "t0"), t) for t in range(3)]
    assert {(r.episode, r.purpose) for r in engine.requests} == {("t0", "")}
    assert episode.started <= episode.ended


def test_episodes_do_not_depend_on_what_runs_beside_them():
    pairs = list(repeat(tasks(1, 3, 2, 4, 1), samples=2))
    by_batch = [{e.id: e.calls for e in agent(batch=b).play(pairs)} for b in (1, 3, 10)]
    assert by_batch[0] == by_batch[1] == by_batch[2]
    assert len(by_batch[0]) == 10
    assert by_batch[0] != {e.id: e.calls for e in agent().play(pairs, seed=1)}


def test_seeds_differ_by_run_episode_and_turn():
    seeds = {call_seed(episode_seed(run, name), turn) for run in (0, 1) for name in "ab" for turn in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_finished_place_goes_to_the_next_task():
    engine = Counts()
    assert [e.id for e in agent(engine).play(tasks(1, 4, 1, 1))] == ["t0", "t2", "t3", "t1"]
    assert engine.sizes == [2, 2, 2, 1]


def test_outcomes_come_with_the_episodes():
    [(episode, outcome)] = agent().graded(tasks(2))
    assert (episode.reward, outcome) == (2.0, Outcome(2.0, 1.0, 0.5, False))


def test_a_context_without_room_ends_the_episode():
    [episode] = agent(max_context=9).play(tasks(5))
    assert len(episode.calls) == 1  # q of 4, a response of 3 and an observation of 2 leave no room
    assert episode.reward == 1.0
    assert len(next(agent(max_context=10).play(tasks(5))).calls) == 5


def test_a_task_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"has 4 tokens, and max_context is 4: raise it, or leave the task out"):
        list(agent(max_context=4).play(tasks(1)))


def test_an_environment_must_begin_and_answer_everybody():
    silent = SimpleNamespace(start=lambda task: Observation(None))
    with pytest.raises(ValueError, match="gave no text"):
        list(Agent(Counts(), silent, Mem1(), Letters()).play(tasks(1)))
    short = SimpleNamespace(start=lambda task: Observation("q"), step=lambda live: [Observation(None)])
    with pytest.raises(ValueError, match=r"step\(\) gave 1 observations for 2 episodes"):
        list(Agent(Counts(), short, Mem1(), Letters()).play(tasks(1, 1)))


# ---- the memory's query


class Searches(Rounds):
    """Records what would be searched for."""

    def __init__(self):
        self.queries = []

    def step(self, live):
        self.queries += [p.query("keys") for p in live]
        return super().step(live)


def test_the_agent_wires_the_memorys_query():
    class Shouts(Mem1):
        def query(self, response, keywords):
            return f"{keywords.upper()} {response}"

    environment = Searches()
    [episode] = Agent(Counts(), environment, Shouts(), Letters()).play(tasks(2))
    assert environment.queries == [f"KEYS {text(c.completion)}" for c in episode.calls]


def test_a_memory_without_a_query_searches_for_the_keywords():
    environment = Searches()
    list(Agent(Counts(), environment, Mem1(), Letters()).play(tasks(1)))
    assert environment.queries == ["keys"]


# ---- a memory that asks the model


class NoteTaking:
    """As many notes of an observation as its turn's number, at first none; the context is all notes, then the news."""

    def __init__(self, stop=(".",), **rest):
        self.stop, self.rest = stop, rest

    def context(self, turns):
        new = turns[-1]
        notes = [reply for turn in turns for reply in turn.replies]
        for n in range(len(turns) - 1):
            notes += [(yield Ask(f"{text(new.observation)}/{n}?", "note", stop=self.stop, **self.rest))]
        return [Piece(r.ids, "memory", r.call) for r in notes] + [Piece(new.observation, "observation", new.call)]


def test_a_memorys_calls_are_recorded_with_their_purpose():
    engine = Counts()
    [episode] = agent(engine, NoteTaking(max_tokens=5), sampling=Sampling(max_tokens=9)).play(tasks(4))
    assert [c.purpose for c in episode.calls] == ["", "", "note", "", "note", "note", ""]
    assert [c.purpose for c in episode.actions] == [""] * 4
    n = [text(c.completion) for c in episode.calls]
    assert [text(c.prompt) for c in episode.calls] == [
        "[t0]", "[t0]o0", "[o1/0?]", f"[t0]{n[2]}o1", "[o2/0?]", "[o2/1?]", f"[t0]{n[2]}{n[4]}{n[5]}o2",
    ]  # fmt: skip
    assert episode.calls[2].segments == (Segment("observation", 0, 7, source=1),)
    assert episode.calls[6].segments == (
        Segment("prefix", 0, 4),
        Segment("memory", 4, 7, source=2),
        Segment("memory", 7, 10, source=4),
        Segment("memory", 10, 13, source=5),
        Segment("observation", 13, 15, source=3),
    )
    assert [c.reward for c in episode.calls] == [0.25, 0.25, 0, 0.25, 0, 0, 0.5]
    assert all(c.trainable and c.policy_version == 7 and c.logprobs is not None for c in episode.calls)
    seed = episode_seed(0, "t0")
    names = ["0", "1", "1/note/0", "2", "2/note/0", "2/note/1", "3"]
    assert [r.seed for r in engine.requests] == [episode_seed(seed, name) for name in names]
    assert [r.purpose for r in engine.requests] == [c.purpose for c in episode.calls]
    assert [r.sampling.max_tokens for r in engine.requests] == [9, 9, 5, 9, 5, 5, 9]
    assert [r.stop for r in engine.requests[:3]] == [("!",), ("?",), (".",)]
    assert episode.reward == 4.0  # the environment saw four responses


def test_actions_draw_as_if_the_memory_had_not_asked():
    plain, noting = (next(agent(memory=m).play(tasks(5))) for m in (Mem1(), NoteTaking()))
    assert [c.completion.tolist() for c in plain.calls] == [c.completion.tolist() for c in noting.actions]


def test_the_questions_of_all_episodes_go_together():
    """Two episodes with the same needs and one with fewer: a question of each in one batch."""
    engine = Counts()
    list(agent(engine, NoteTaking(), batch=3).play(tasks(3, 3, 2)))
    assert engine.sizes == [3, 3, 2, 2]  # actions, actions, notes of turn 1, last actions: turn 0 needs no note


def test_noting_episodes_do_not_depend_on_what_runs_beside_them():
    pairs = list(repeat(tasks(1, 4, 2, 5, 3), samples=2))
    by_batch = [{e.id: e.calls for e in agent(memory=NoteTaking(), batch=b).play(pairs)} for b in (1, 3, 10)]
    assert by_batch[0] == by_batch[1] == by_batch[2]
    assert any(len(e) > 10 for e in by_batch[0].values())


def test_a_question_may_stand_behind_q_or_be_ids():
    class Both:
        def context(self, turns):
            said = Piece(turns[-1].response, "memory", turns[-1].call)
            first = yield Ask([said], "summary", trainable=False)
            second = yield Ask(np.array([65, 66], np.int32), "check")
            return [Piece(first.ids, "memory", first.call), Piece(second.ids, "memory", second.call)]

    [episode] = agent(memory=Both(), rule="both").play(tasks(2))
    action, summary, check, last = episode.calls
    assert text(summary.prompt) == f"[t0]{text(action.completion)}"
    assert summary.segments == (Segment("prefix", 0, 4), Segment("memory", 4, 7, source=0))
    assert (summary.purpose, summary.trainable) == ("summary", False)
    assert (text(check.prompt), check.trainable) == ("AB", True)
    assert text(last.prompt) == f"[t0]{text(summary.completion)}{text(check.completion)}"


def test_a_question_that_does_not_fit_is_one_line():
    line = r"episode 't0': the memory rule's prompt for 'note' has 7 tokens, and max_context is 7: raise it, or ask"
    with pytest.raises(ValueError, match=line):
        list(agent(memory=NoteTaking(), max_context=7).play(tasks(3)))
    assert len(next(agent(memory=NoteTaking(), max_context=10).play(tasks(3))).calls) == 4


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (None, r"memory 'mine': context\(\) must return one or more pieces, got None"),
        ([], "one or more pieces"),
        (["text"], "one or more pieces"),
        ((x for x in ["what?"]), r"context\(\) must yield Ask, got str"),
    ],
)
def test_a_memory_that_makes_something_else(made, line):
    memory = SimpleNamespace(context=lambda turns: made)
    with pytest.raises(ValueError, match=line):
        list(agent(memory=memory, rule="mine").play(tasks(2)))


def test_a_question_says_its_purpose():
    with pytest.raises(ValueError, match="purpose must not be empty"):
        Ask("what?", purpose="")


@pytest.mark.parametrize("prompt", [[5, 6, 7], ["text"]])
def test_a_question_is_text_an_array_or_pieces(prompt):
    with pytest.raises(ValueError, match=r"Ask\.prompt must be text, a NumPy array of token ids, or pieces"):
        Ask(prompt)


def test_an_agent_needs_room_for_an_episode():
    with pytest.raises(ValueError, match=r"Agent\.batch must be 1 or more, got 0"):
        agent(batch=0)


def test_a_call_that_the_engine_ended_before_its_first_token_names_the_cause():
    nothing = Completion(np.empty(0, np.int32), np.empty(0), StopReason.ABORTED)
    engine = SimpleNamespace(generate=lambda requests: [nothing for _ in requests])
    with pytest.raises(ValueError, match=r"episode 't0': call 0: the engine ended it \(aborted\) before its first"):
        list(agent(engine=engine).play(tasks(2)))


def test_what_reads_episodes_copes_with_the_memorys_calls(tmp_path):
    """The store, the compiler, the flattened control, the report and the measures."""
    [task] = tasks(4)
    [episode] = agent(memory=NoteTaking()).play([task])
    write_episodes(tmp_path / "store", [episode])
    [again] = read_episodes(tmp_path / "store")
    assert again.calls == episode.calls
    sampled = np.concatenate([c.completion for c in episode.calls]).tolist()
    assert compile_calls(episode.calls).decisions.token.tolist() == sampled
    assert persistent_history(episode).decisions.token.tolist() == sampled
    n = [text(c.completion) for c in episode.calls]
    flat = f"[t0]{n[0]}o0{n[1]}[o1/0?]{n[2]}o1{n[3]}[o2/0?]{n[4]}[o2/1?]{n[5]}o2{n[6]}"
    history, known = contexts(episode)
    assert text(history.ids) == flat
    assert [text(np.concatenate([p.ids for p in c.read])) for c in known] == [text(c.prompt) for c in episode.calls]
    found = measure(episode, task, text)
    assert (found.calls, found.peak, found.peak_without_q) == (4, 15 + 3, 11 + 3)  # actions
    lengths = [len(c.prompt) for c in episode.calls]
    assert found.dependency == sum(3 * (length + 1) for length in lengths)  # every call


def test_an_audit_scores_the_memorys_calls_too():
    """A question that is shorter than q: no mask covers less than what was sampled."""
    task = Task("a task that takes long to ask", tasks(4)[0].questions)
    [episode] = agent(memory=NoteTaking()).play([task])
    assert len(episode.calls[2].prompt) < len(episode.calls[0].prompt)
    found = audit(tiny_model("qwen2"), [episode])
    assert found.passed
    assert (found.calls, found.domain.sampled) == (7, 21)
    assert found.domain.trajectory_spurious >= 0
    assert found.domain.response_spurious == sum(  # what an action reads behind q; a question is a turn of its own
        len(c.prompt) - len(episode.calls[0].prompt) for c in episode.actions
    )
