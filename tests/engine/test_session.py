"""Sessions: what ends together, who enters when, and what is left when one closes."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from memopd.engine import Completion, Request, Ticket, open_session
from memopd.engine.local import LocalEngine
from memopd.engine.local import engine as local_module
from memopd.engine.session import Tickets
from memopd.types import Sampling, StopReason
from memopd.verify.families import tiny_model


@pytest.fixture(scope="module")
def model():
    made = tiny_model("qwen2")
    made.generation_config.eos_token_id = None
    return made


def request(seed=0, tokens=4, length=10):  # too short to wait for a prefix that others compute
    return Request(np.arange(5, 5 + length), seed, Sampling(max_tokens=tokens))


def ids(ended):
    return [r.seed for r, _ in ended]


# ---- the local engine


def test_each_wait_returns_the_requests_that_ended_in_one_step(model):
    engine = LocalEngine(model, None, slots=8, max_length=64)
    with open_session(engine) as session:
        assert session.wait() == []
        session.submit([request(i, tokens=n) for i, n in enumerate((7, 3, 7, 3, 5))])
        assert ids(session.wait()) == [1, 3]
        session.submit([request(5, tokens=2)])
        assert ids(session.wait()) == [4, 5]
        assert ids(session.wait()) == [0, 2]
        assert session.wait() == []


def test_a_session_samples_what_generate_samples(model):
    engine = LocalEngine(model, None, slots=3, max_length=64)
    some = [request(i, tokens=3 + i) for i in range(6)]
    made = {}
    with open_session(engine) as session:
        session.submit(some)
        while ended := session.wait():
            made |= dict(ended)
    for one, expected in zip(some, engine.generate(some), strict=True):
        assert made[one].tokens.tolist() == expected.tokens.tolist()


def test_a_bad_request_enters_nothing(model):
    engine = LocalEngine(model, None, slots=3, max_length=64)
    with open_session(engine) as session:
        with pytest.raises(ValueError, match="leaves no room"):
            session.submit([request(), request(length=64)])
        assert session.wait() == []


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("waited", [False, True])
def test_closing_cancels_what_runs_and_what_waits(model, waited, ahead):
    engine = LocalEngine(model, None, slots=2, max_length=64)
    engine.runs_ahead = ahead
    with open_session(engine) as session:
        session.submit([request(0, tokens=2), request(1, tokens=40), request(2, tokens=40), request(3, tokens=40)])
        if waited:
            assert ids(session.wait()) == [0]
    assert not engine._running
    assert not engine._waiting
    assert not engine._sessions
    assert not [t for t in threading.enumerate() if t.name == "memopd-engine"]
    assert len(engine.generate([request()])[0].tokens) == 4


def test_closing_when_the_step_ahead_has_nothing_to_run(model):
    """What would have entered it was cancelled before it began."""
    engine = LocalEngine(model, None, slots=1, max_length=64)
    engine.runs_ahead = True
    session = open_session(engine)
    session.submit([request(0, tokens=2), request(1, tokens=40)])
    with engine._lock:  # so that the step does not begin in between
        assert ids(session.wait()) == [0]
        for sequence in session._open:
            engine._cancel(sequence)
    closing = threading.Thread(target=session.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert len(engine.generate([request()])[0].tokens) == 4


def waited(session):
    """What `wait` returns, in a thread of its own, so that a test fails where it would never return."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(session.wait()), daemon=True)
    thread.start()
    thread.join(20)
    assert ended, "wait does not return"
    return [(r.seed, c.stop) for r, c in ended[0]]


@pytest.mark.parametrize("paused", [False, True])
def test_a_session_gets_its_requests_back_from_an_engine_that_was_closed(model, paused):
    engine = LocalEngine(model, None, slots=1, max_length=64)
    session = open_session(engine)
    session.submit([request(0, tokens=2), request(1, tokens=40), request(2, tokens=40)])
    expected = [0, 1, 2]
    if paused:
        assert waited(session) == [(0, StopReason.LENGTH)]
        session.pause()
        expected = [1, 2]
    engine.close()
    assert waited(session) == [(seed, StopReason.ABORTED) for seed in expected]
    assert session.wait() == []
    session.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_session_holds_up_nobody_else(model, ahead):
    """Its caller does not wait; others are served meanwhile, and its own requests go on beside theirs."""
    engine = LocalEngine(model, None, slots=4, max_length=64)
    engine.runs_ahead = ahead
    with open_session(engine) as session:
        session.submit([request(0, tokens=2), request(1, tokens=6), request(2, tokens=40)])
        assert ids(session.wait()) == [0]
        ticket = engine.submit(request(9, tokens=10))
        assert len(ticket.completion.result(timeout=60).tokens) == 10
        with engine.updating(4):
            assert not engine._running
        session.submit([request(3)])
        assert ids(session.wait()) == [1, 2]
        assert [c.policy_version for _, c in session.wait()] == [4]


# ---- steps ahead, as on a GPU


def played(model, monkeypatch, delay, engine_delay=0.0):
    """Chains of requests, each submitted when the one before it ended. Returns the rows of all passes, and tokens."""
    passes, made, run, step = [], {}, LocalEngine._pass, LocalEngine._step

    def late(self):
        time.sleep(engine_delay)  # time for the caller to submit before anything enters
        return step(self)

    def noted(self, entering):
        passes.append(([s.request.seed for s in self._running], [s.request.seed for s, _ in entering]))
        return run(self, entering)

    monkeypatch.setattr(LocalEngine, "_pass", noted)
    monkeypatch.setattr(LocalEngine, "_step", late)
    engine = LocalEngine(model, None, slots=5, max_length=64)
    engine.runs_ahead = True
    with open_session(engine) as session:
        session.submit([request(i, tokens=2 + i) for i in range(6)])
        for turn in range(40):
            ended = session.wait()
            if not ended:
                break
            time.sleep(delay(turn))  # its work
            made |= {r.seed: c.tokens.tolist() for r, c in ended}
            session.submit([request(r.seed + 10, tokens=3 + r.seed % 4) for r, _ in ended if r.seed < 30])
            if turn % 3 == 2:
                session.pause()
                assert engine._thread is None
    monkeypatch.undo()
    assert len(made) == 24
    return passes, made


SLOW = (lambda turn: 0, lambda turn: 0.02, lambda turn: 0.02 * (turn % 2))


def test_what_enters_a_step_does_not_depend_on_how_long_the_caller_takes(model, monkeypatch):
    first, *others = [played(model, monkeypatch, delay) for delay in SLOW]
    assert all(other == first for other in others)
    assert played(model, monkeypatch, SLOW[0], engine_delay=0.02) == first


def test_without_the_rule_it_would(model, monkeypatch):
    """Requests that do not wait for the end of the step ahead enter it if the caller is fast."""
    first = played(model, monkeypatch, SLOW[1])

    def hasty(self, sequences):
        ahead = [session for session in self._sessions if session.ahead]
        for session in ahead:
            session.ahead = False
        tickets = enter(self, sequences)
        for session in ahead:
            session.ahead = True
        return tickets

    enter = LocalEngine._enter
    monkeypatch.setattr(LocalEngine, "_enter", hasty)
    assert played(model, monkeypatch, SLOW[0], engine_delay=0.02) != first


def test_the_engine_works_while_the_caller_does(model):
    engine = LocalEngine(model, None, slots=4, max_length=64)
    for ahead in (False, True):
        engine.runs_ahead = ahead
        with open_session(engine) as session:
            session.submit([request(0, tokens=2), request(1, tokens=3), request(2, tokens=9)])
            assert ids(session.wait()) == [0]
            deadline = time.time() + (20 if ahead else 0.3)
            while time.time() < deadline and len(session.ended) == 0:
                time.sleep(0.01)
            assert [s.request.seed for s in session.ended] == ([1] if ahead else [])
            assert ids(session.wait()) == [1]


def test_few_prompts_enter_together_after_some_replays(model, monkeypatch):
    """As on a GPU, with passes in place of graphs. One prompt waits for two replays; others' prompts do not wait."""
    monkeypatch.setattr(LocalEngine, "_can_replay", lambda self: bool(self._running))

    def replay(self):
        self._replays += 1
        steps.append(0)
        return self._pass([])

    def admitted(self, entering):
        admit(self, entering)
        if entering:
            steps.append(len(entering))

    steps, admit = [], LocalEngine._admit
    monkeypatch.setattr(LocalEngine, "_replay", replay)
    monkeypatch.setattr(LocalEngine, "_admit", admitted)
    engine = LocalEngine(model, None, slots=12, max_length=64)
    with open_session(engine) as session:
        session.submit([request(i, tokens=2 if i in (0, 5) else 9, length=5 + i) for i in range(10)])
        assert ids(session.wait()) == [0, 5]
        session.submit([request(20, tokens=9)])  # 1 · FEW < 8
        session.wait()
        assert steps[:5] == [10, 0, 0, 1, 0]
    steps.clear()
    with open_session(engine) as session:
        session.submit([request(i, tokens=2 if i in (0, 5) else 9, length=5 + i) for i in range(10)])
        session.wait()
        session.submit([request(20), request(21)])  # 2 · FEW = 8: not few
        session.wait()
        assert steps[:3] == [10, 0, 2]
    steps.clear()
    monkeypatch.setattr(local_module, "REPLAYS", 3)
    with open_session(engine) as session:
        session.submit([request(i, tokens=2 if i in (0, 5) else 9, length=5 + i) for i in range(10)])
        session.wait()
        engine.generate([request(30)])
        assert steps[:3] == [10, 0, 1]


# ---- servers


class Server:
    """Tickets that the test answers."""

    def __init__(self):
        self.futures, self.cancelled = {}, []

    def submit(self, request):
        future = self.futures[request.seed] = Future()

        def cancel():
            self.cancelled.append(request.seed)
            if not future.done():
                self.answer(request.seed, StopReason.ABORTED)

        return Ticket(future, cancel)

    def answer(self, seed, stop=StopReason.STOP):
        self.futures[seed].set_result(Completion(np.array([seed], np.int32), np.zeros(1), stop))


def test_servers_completions_come_as_they_end():
    server = Server()
    with Tickets(server.submit) as session:
        assert session.wait() == []
        session.submit([request(i) for i in range(5)])
        server.answer(3)
        server.answer(1)
        assert [(r.seed, c.tokens.tolist()) for r, c in session.wait()] == [(3, [3]), (1, [1])]
        threading.Timer(0.05, server.answer, [0]).start()
        assert ids(session.wait()) == [0]
        server.futures[2].set_exception(ConnectionError("gone"))
        with pytest.raises(ConnectionError, match="gone"):
            session.wait()
    assert server.cancelled == [4]


def test_after_an_error_of_a_server_the_session_goes_on():
    """What ended beside the request that failed is no longer open, so nobody waits for it again."""
    server = Server()
    session = Tickets(server.submit)
    session.submit([request(i) for i in range(3)])
    server.futures[0].set_exception(ValueError("refused"))
    server.answer(1)
    with pytest.raises(ValueError, match="refused"):
        session.wait()
    server.answer(2)
    assert waited(session) == [(2, StopReason.STOP)]
    assert waited(session) == []


# ---- an engine with nothing but `generate`


def test_an_engine_without_sessions_samples_batch_after_batch():
    class Plain:
        def generate(self, requests):
            batches.append(ids((r, None) for r in requests))
            return [Completion(np.array([r.seed], np.int32), None, StopReason.STOP) for r in requests]

    batches = []
    with open_session(Plain()) as session:
        assert session.wait() == []
        session.submit([request(0), request(1)])
        session.submit([request(2)])
        assert ids(session.wait()) == [0, 1, 2]
        session.submit([request(3)])
    assert batches == [[0, 1, 2]]
