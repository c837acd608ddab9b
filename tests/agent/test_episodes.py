"""Episodes advance by themselves on the local engine: no call waits for another, and no clock changes a result.

A tiny model in float64, a token per character. An action has as many tokens as the table says for its episode.
"""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from test_agent import Letters, NoteTaking, Rounds, tasks

from memopd.agent import Agent, Observation
from memopd.agent.memory import Mem1
from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.local import engine as engine_module
from memopd.engine.local.cache import Cache
from memopd.engine.local.sequence import SampledSequence
from memopd.models.attention import sampling_attention
from memopd.types import Sampling, StopReason
from memopd.verify.families import tiny_model

TOKENS = {"t0": 60}  # others: 6
SIZES = (1, 3, 2, 4, 1, 2)


@pytest.fixture(scope="module")
def model():
    made = tiny_model("qwen2").double()
    made.generation_config.eos_token_id = None
    return made


class Engine(LocalEngine):
    """Counts its passes, and ends each action when the table says so."""

    def __init__(self, model, tokens=None, slots=8, max_length=256):
        super().__init__(model, None, slots=slots, max_length=max_length)
        self.tokens, self.passes = TOKENS if tokens is None else tokens, 0

    def _read(self, request):
        sequence = super()._read(request)
        if not request.purpose:
            sequence.limit = self.tokens.get(request.episode, 6)
        return sequence

    def _pass(self, entering):
        self.passes += 1
        return super()._pass(entering)


class Steps(Rounds):
    """Without stop strings, which need a real tokenizer. Records who came together."""

    def __init__(self, seconds=0.0):
        self.groups, self.seconds = [], seconds

    def start(self, task):
        return Observation(task.id)

    def step(self, live):
        time.sleep(self.seconds)
        self.groups.append([p.task.id for p in live])
        return [Observation(o.text, reward=o.reward) for o in super().step(live)]


def agent(engine, environment=None, memory=None, batch=2):
    return Agent(engine, environment or Steps(), memory or Mem1(), Letters(), Sampling(), batch, max_context=200)


def bits(episodes):
    return [
        (e.id, [(c.prompt.tolist(), c.completion.tolist(), c.logprobs.tolist()) for c in e.calls]) for e in episodes
    ]


def mixed_lengths(seed=0):
    rng = np.random.default_rng(seed)
    return {f"t{i}": int(n) for i, n in enumerate(rng.integers(2, 12, len(SIZES)))}


def no_thread():
    return not [t for t in threading.enumerate() if t.name == "memopd-engine"]


def nothing_is_open(engine):
    return not engine._running and not engine._waiting and len(engine._slots.free) == len(engine._slots.tokens)


# ---- no call waits for another


def test_short_calls_end_while_a_long_one_runs(model):
    """Five episodes of two calls of 6 tokens share a place and take the 60 steps of the one long call, not more."""
    engine = Engine(model)
    played = list(agent(engine).play(tasks(1, 2, 2, 2, 2, 2)))
    assert [len(c.completion) for e in played for c in e.calls] == [6] * 8 + [60] + [6] * 2
    assert [e.id for e in played] == ["t1", "t2", "t3", "t4", "t0", "t5"]  # in step 60 as in every step: by submission
    assert engine.passes == 60  # call by call in rounds it were 60 + 9 · 6


def test_a_place_is_never_empty(model):
    """Each episode takes as many steps as it samples tokens, and the next one takes its place: not one step more."""
    tokens, batch = mixed_lengths(), 3
    engine = Engine(model, tokens)
    list(agent(engine, batch=batch).play(tasks(*SIZES)))
    places = [0] * batch
    for i, k in enumerate(SIZES):
        places[places.index(min(places))] += k * tokens[f"t{i}"]
    assert engine.passes == max(places)


def test_the_memorys_calls_wait_for_nobody(model):
    """The one with notes samples 3 actions of 6 tokens and a note of 4; the other one 60 tokens at once."""
    engine, environment = Engine(model), Steps()
    [noting, long] = agent(engine, environment, NoteTaking(stop=(), max_tokens=4)).play(tasks(1, 3))
    assert [len(c.completion) for c in noting.calls] == [6, 6, 4, 6]
    assert (long.id, engine.passes) == ("t0", 60)
    assert environment.groups == [["t1"], ["t1"], ["t1"], ["t0"]]


# ---- results are a function of the seeds


def test_those_that_end_in_one_step_share_a_step_of_the_environment(model):
    environment = Steps()
    list(agent(Engine(model, {"t1": 12}), environment, batch=4).play(tasks(3, 1, 3, 2)))
    assert environment.groups == [["t0", "t2", "t3"], ["t1", "t0", "t2", "t3"], ["t0", "t2"]]


@pytest.mark.parametrize("memory", [Mem1(), NoteTaking(stop=(), max_tokens=5)], ids=["mem1", "notes"])
def test_repeated_bit_for_bit_however_slow_the_environment_is(model, memory):
    runs = []
    for seconds in (0.0, 0.003):
        engine, environment = Engine(model, mixed_lengths(), slots=4), Steps(seconds)
        played = bits(agent(engine, environment, memory, batch=4).play(tasks(*SIZES), seed=3))
        runs.append((played, environment.groups, engine.passes))
    assert runs[0] == runs[1]
    assert {len(group) for group in runs[0][1]} > {1}


def test_an_engine_that_does_not_wait_is_noticed(model, monkeypatch):
    """The check above can fail: this engine samples on while the environment takes its time."""
    expected = Engine(model, mixed_lengths(), slots=4)
    list(agent(expected, batch=4).play(tasks(*SIZES)))
    monkeypatch.setattr(SampledSequence, "is_awaited", True)
    hasty = Engine(model, mixed_lengths(), slots=4)
    list(agent(hasty, Steps(seconds=0.02), batch=4).play(tasks(*SIZES)))
    assert hasty.passes > expected.passes


def test_an_episode_depends_on_its_own_seed_alone(model):
    """Alone, beside others, in other slots and in another order: the same tokens, and log p up to rounding."""
    some, tokens = tasks(*SIZES), mixed_lengths()
    expected = {e.id: e for e in agent(Engine(model, tokens, slots=1), batch=1).play(some, seed=5)}
    for order, batch, slots in ((some, 3, 3), (some[::-1], 6, 8), (some[2:3], 1, 2), (some, 6, 2)):
        for episode in agent(Engine(model, tokens, slots=slots), batch=batch).play(order, seed=5):
            for call, other in zip(episode.calls, expected[episode.id].calls, strict=True):
                assert call.completion.tolist() == other.completion.tolist()
                assert np.abs(call.logprobs - other.logprobs).max() < 1e-10
    others = {e.id: e for e in agent(Engine(model, tokens)).play(some, seed=6)}
    assert all(others[id].calls != expected[id].calls for id in expected)


# ---- errors, and who stops early


def test_an_environment_that_fails_leaves_nothing_open(model):
    class Breaks(Steps):
        def step(self, live):
            if len(self.groups) == 2:
                raise ConnectionError("no index")
            return super().step(live)

    engine, before = Engine(model), model.config._attn_implementation
    with pytest.raises(ConnectionError, match="no index"):
        list(agent(engine, Breaks(), batch=4).play(tasks(1, 3, 3, 3, 3)))
    assert nothing_is_open(engine)
    assert no_thread()
    assert model.config._attn_implementation == before
    assert len(list(agent(engine).play(tasks(1, 2)))) == 2


def test_a_pass_that_fails_reaches_the_caller(model, monkeypatch):
    engine, write = Engine(model), Cache.write

    def fails(*arguments):
        return 1 / 0 if engine.passes == 10 else write(*arguments)

    monkeypatch.setattr(Cache, "write", fails)
    with pytest.raises(ZeroDivisionError):
        list(agent(engine, batch=4).play(tasks(1, 3, 3, 3, 3)))
    assert nothing_is_open(engine)
    monkeypatch.undo()
    assert len(list(agent(engine).play(tasks(1, 2)))) == 2


def test_a_bad_prompt_ends_the_calls_beside_it(model):
    engine = Engine(model, max_length=64)
    with pytest.raises(ValueError, match="episode 't1': a prompt of 67 tokens leaves no room"):
        list(agent(engine).play([tasks(1)[0], ("t1", type(tasks(1)[0])("x" * 65, tasks(1)[0].questions))]))
    assert nothing_is_open(engine)


def test_an_abandoned_play_cancels_its_calls(model):
    engine = Engine(model)
    playing = agent(engine).play(tasks(1, 1, 3))
    assert next(playing).id == "t1"
    assert [s.request.episode for s in engine._running] == ["t0"]
    playing.close()
    assert nothing_is_open(engine)
    assert no_thread()
    assert engine.passes < 10


def test_between_two_episodes_the_engine_and_the_model_are_free(model):
    """Nothing runs while nobody waits; others may sample, set the version and use the model. Then it goes on."""
    engine, before = Engine(model), model.config._attn_implementation
    expected = bits(agent(Engine(model)).play(tasks(1, 1, 3)))
    playing = agent(engine).play(tasks(1, 1, 3))
    episodes = [next(playing)]
    assert no_thread()
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 131)
    assert engine.passes == 6
    assert len(engine.generate([Request(np.arange(5, 9), 0, Sampling(max_tokens=3))])[0].tokens) == 6  # the table's
    engine.version = 3
    assert not engine._running  # the long call ended first, and is delivered to the play that goes on
    episodes += playing
    assert sorted(e.id for e in episodes) == ["t0", "t1", "t2"]
    assert {c.policy_version for e in episodes if e.id == "t0" for c in e.calls} == {0}
    assert {c.policy_version for e in episodes if e.id == "t2" for c in e.calls} == {3}
    tokens = {id: [c[1] for c in calls] for id, calls in bits(episodes)}
    assert tokens == {id: [c[1] for c in calls] for id, calls in expected}


def test_weights_that_change_under_open_calls_are_an_error():
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = None
    engine = Engine(model)
    playing = agent(engine).play(tasks(1, 1, 3))
    next(playing)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    with pytest.raises(ValueError, match=r"the weights changed while requests were open: change them in `engine.upd"):
        next(playing)
    assert nothing_is_open(engine)
    assert len(list(agent(engine).play(tasks(1, 2)))) == 2


def test_an_environment_may_ask_the_engine_itself(model):
    """A user who is simulated by the same engine: it answers although the episodes' calls are open."""

    class Simulated(Steps):
        def step(self, live):
            made = engine.generate([Request(np.arange(5, 9), 0, episode="user") for _ in live])
            assert {c.stop for c in made} == {StopReason.LENGTH}
            return super().step(live)

    runs = []
    for _ in range(2):
        engine, environment = Engine(model, mixed_lengths()), Simulated()
        runs.append((bits(agent(engine, environment, batch=4).play(tasks(*SIZES))), environment.groups, engine.passes))
    assert runs[0] == runs[1]


def test_two_plays_in_turn_share_an_engine(model):
    engine = Engine(model, mixed_lengths(), slots=4)
    one, other = (agent(engine).play(tasks(*SIZES), seed=s) for s in (1, 2))
    played = [e for pair in zip(one, other, strict=True) for e in pair]
    for seed in (1, 2):
        alone = {e.id: e for e in agent(Engine(model, mixed_lengths())).play(tasks(*SIZES), seed=seed)}
        for e in played[seed - 1 :: 2]:
            assert [c.completion.tolist() for c in e.calls] == [c.completion.tolist() for c in alone[e.id].calls]
    assert nothing_is_open(engine)


def test_an_engine_that_closes_ends_the_play(model):
    class Closes(Steps):
        def step(self, live):
            engine.close()
            return super().step(live)

    engine = Engine(model)
    with pytest.raises(ValueError, match="this engine is closed"):
        list(agent(engine, Closes()).play(tasks(1, 3)))
    assert nothing_is_open(engine)


def test_the_model_stays_with_the_engine_if_nobody_uses_it_between_episodes(model, monkeypatch):
    """The engine enters its attention once instead of once per end of an episode, and samples the same."""
    entered = []

    @contextmanager
    def counted(model):
        entered.append(model)
        with sampling_attention(model):
            yield

    monkeypatch.setattr(engine_module, "sampling_attention", counted)
    free = [e for e, _ in agent(Engine(model)).graded(tasks(*SIZES))]
    assert len(entered) > 2
    entered.clear()
    kept = [e for e, _ in agent(Engine(model)).graded(tasks(*SIZES), frees_model=False)]
    assert len(entered) == 1
    assert bits(kept) == bits(free)
    assert model(torch.tensor([[1]])) is not None  # the model is free again
