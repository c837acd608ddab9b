"""Requests at any time and from any thread: tickets, listeners, stop strings, errors, updates meanwhile."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_stops import byte_level

from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.local.cache import Cache
from memopd.engine.stops import vocabulary_bytes
from memopd.types import Sampling, StopReason
from memopd.verify.families import VOCABULARY, tiny_model

PROMPT = np.arange(5, 25)


@pytest.fixture(scope="module")
def model():
    made = tiny_model("qwen2")
    made.generation_config.eos_token_id = None  # completions as long as asked for
    return made


def engine(model, slots=8, tokenizer=None, max_length=512):
    return LocalEngine(model, tokenizer, slots=slots, max_length=max_length)


def long(seed=0, tokens=480):
    return Request(PROMPT, seed, Sampling(max_tokens=tokens), episode="long")


def test_thirty_two_threads(model):
    """Each gets its own completion, whatever the others ask for."""
    rng = np.random.default_rng(0)
    some = [
        Request(rng.integers(3, VOCABULARY, rng.integers(1, 60)), s, Sampling(max_tokens=int(rng.integers(1, 30))))
        for s in range(160)
    ]
    one = engine(model, slots=16)
    with ThreadPoolExecutor(32) as threads:
        made = list(threads.map(lambda r: one.submit(r).completion.result(timeout=120), some))
    expected = engine(model).generate(some)
    same = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in zip(made, expected, strict=True))
    assert same >= 159  # one draw within rounding of a boundary is allowed for
    assert all(len(c.tokens) == len(c.logprobs) == r.sampling.max_tokens for c, r in zip(made, some, strict=True))
    assert not one._running
    assert len(one._slots.free) == 16


def test_a_listener_hears_every_token_in_order(model):
    heard, threads = [], set()

    def listen(token):
        heard.append(token)
        threads.add(threading.current_thread().name)

    made = engine(model).submit(long(tokens=30), listen).completion.result(timeout=60)
    assert heard == made.tokens.tolist()
    assert threads == {"memopd-engine"}


def test_cancel_gives_what_was_sampled_so_far(model):
    one, enough = engine(model), threading.Event()
    whole = one.generate([long()])[0]
    ticket = one.submit(long(), lambda _: enough.set())
    beside = one.submit(Request(PROMPT, 9, Sampling(max_tokens=20)))
    assert enough.wait(60)
    ticket.cancel()
    made = ticket.completion.result(timeout=60)
    assert made.stop is StopReason.ABORTED
    assert 1 <= len(made.tokens) == len(made.logprobs) < 480
    assert made.tokens.tolist() == whole.tokens[: len(made.tokens)].tolist()
    assert len(beside.completion.result(timeout=60).tokens) == 20
    ticket.cancel()  # once more does nothing


def test_cancel_before_it_began(model):
    one = engine(model, slots=1)
    first, second = one.submit(long()), one.submit(long())
    second.cancel()
    made = second.completion.result(timeout=60)
    assert (made.stop, len(made.tokens)) == (StopReason.ABORTED, 0)
    first.cancel()
    assert first.completion.result(timeout=60).stop is StopReason.ABORTED
    assert not second.completion.cancel()  # only the ticket cancels


def test_close_ends_everything(model):
    one = engine(model, slots=1)
    tickets = [one.submit(long()) for _ in range(3)]
    one.close()
    assert all(t.completion.result(timeout=60).stop is StopReason.ABORTED for t in tickets)
    with pytest.raises(ValueError, match="closed"):
        one.generate([long()])


def test_mistakes_name_the_episode_and_harm_nobody(model):
    one = engine(model, max_length=64)
    beside = one.submit(Request(PROMPT, 0, Sampling(max_tokens=40)))
    for request, message in (
        (
            Request(np.arange(64), 0, episode="e7"),
            "episode 'e7': a prompt of 64 tokens leaves no room in max_length=64",
        ),
        (Request([VOCABULARY], 0, episode="e7"), "episode 'e7': token id 131 is outside"),
        (Request([5, -3, 7], 0, episode="e7"), "episode 'e7': token id -3 is outside"),
        (Request([], 0, episode="e7"), "episode 'e7': a prompt must be one flat list"),
        (Request([0.5], 0), "a prompt must be one flat list"),
        (Request(PROMPT, 0, stop=("x",), episode="e7"), "episode 'e7': stop strings need a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            one.generate([Request(PROMPT, 0), request])
    assert len(beside.completion.result(timeout=60).tokens) == 40
    for wrong in ({"slots": 0}, {"max_length": 1}, {"max_length": 100_000}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LocalEngine(model, None, **wrong)


def test_a_listener_that_fails_fails_alone(model):
    def hang_up(token):
        raise ConnectionError("gone")

    one = engine(model)
    ticket, beside = one.submit(long(), hang_up), one.submit(Request(PROMPT, 0, Sampling(max_tokens=20)))
    with pytest.raises(ConnectionError, match="gone"):
        ticket.completion.result(timeout=60)
    assert len(beside.completion.result(timeout=60).tokens) == 20


def test_broken_weights_are_an_error_and_mended_ones_work_again():
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = None
    some = [Request(PROMPT[:n], n, Sampling(max_tokens=5)) for n in range(1, 9)]
    one, weight = engine(model), model.model.layers[0].input_layernorm.weight
    before, expected = weight.detach().clone(), one.generate(some)
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not numbers"):
        one.generate([long()] * 8)
    with torch.no_grad():
        weight.copy_(before)
    made = one.generate(some)  # side by side in slots that held NaN
    assert [c.tokens.tolist() for c in made] == [c.tokens.tolist() for c in expected]


def test_a_failing_pass_reaches_everybody_who_waits(model, monkeypatch):
    one = engine(model, slots=2)
    monkeypatch.setattr(Cache, "write", lambda *_: 1 / 0)
    tickets = [one.submit(long()) for _ in range(5)]
    for ticket in tickets:
        with pytest.raises(ZeroDivisionError):
            ticket.completion.result(timeout=60)
    monkeypatch.undo()
    assert len(one.generate([Request(PROMPT, 0, Sampling(max_tokens=5))])[0].tokens) == 5


def test_a_thread_that_dies_tells_everybody(model, monkeypatch):
    one = engine(model)
    monkeypatch.setattr(one, "_check_weights", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.generate([long()] * 3)
    monkeypatch.undo()
    assert len(one.generate([Request(PROMPT, 0, Sampling(max_tokens=5))])[0].tokens) == 5


def test_no_thread_lives_without_work(model):
    one = engine(model)
    one.generate([Request(PROMPT, 0, Sampling(max_tokens=3))])
    deadline = time.monotonic() + 60
    while any(t.name == "memopd-engine" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name == "memopd-engine"]


def test_an_update_waits_for_what_runs_and_holds_what_waits():
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = None
    one, enough = engine(model, slots=1), threading.Event()
    running = one.submit(long(tokens=100), lambda _: enough.set())
    waiting = one.submit(long(tokens=10))
    assert enough.wait(60)
    with one.updating(5), torch.no_grad():
        assert running.completion.result(timeout=60).policy_version == 0
        assert not waiting.completion.done()
        model.model.norm.weight.mul_(1.1)
    assert waiting.completion.result(timeout=60).policy_version == one.version == 5


def test_an_update_that_fails_leaves_the_version(model):
    one = engine(model)
    with pytest.raises(ZeroDivisionError), one.updating(9):
        1 / 0  # noqa: B018
    assert one.generate([Request(PROMPT, 0, Sampling(max_tokens=2))])[0].policy_version == 0


def test_a_release_beside_an_update_keeps_its_version(model):
    one = engine(model)
    one.version = 1
    releasing = threading.Thread(target=one.release, daemon=True)
    with one.updating(2):
        releasing.start()
        releasing.join(0.3)  # so that it waits for the update
    releasing.join(30)
    assert not releasing.is_alive()
    assert one.generate([long(tokens=2)])[0].policy_version == one.version == 2


def within(seconds, work):
    """What `work` returns or raises, in a thread of its own, so that the test fails where it would wait for ever."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as why:
            done.set_exception(why)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)


def set_version(one):
    one.version = 1


def wait_in_session(one):
    session = one.session()
    session.submit([long(tokens=2)])
    try:
        session.wait()
    finally:
        session.close()


WAITS = {
    "updating": lambda one: one.updating(1).__enter__(),
    "update": lambda one: one.update(one.model.state_dict(), 1),
    "version": set_version,
    "release": lambda one: one.release(),
    "generate": lambda one: one.generate([long(tokens=2)]),
    "session": wait_in_session,
}


@pytest.mark.parametrize("name", WAITS)
def test_the_engine_cannot_wait_for_itself(model, name):
    one = engine(model)
    with pytest.raises(RuntimeError, match="own thread"):
        within(30, lambda: one.submit(long(tokens=20), lambda _: WAITS[name](one)).completion.result(20))
    assert len(one.generate([long(tokens=2)])[0].tokens) == 2


@pytest.mark.parametrize("name", WAITS)
def test_an_update_cannot_wait_for_itself(model, name):
    one = engine(model)

    def nested():
        with one.updating(3):
            WAITS[name](one)

    with pytest.raises(RuntimeError, match=r"inside `engine\.updating`"):
        within(20, nested)
    assert one.version == 0
    with one.updating(2):  # a request does not wait
        ticket = one.submit(long(tokens=2))
    assert within(30, lambda: ticket.completion.result(20)).policy_version == 2


# ---- stop strings -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, with the 131 ids that a tiny model samples: letters, some of several, and halves of characters."""
    alphabet = [*map(chr, range(ord("!"), ord("~") + 1)), "Ã", "©", "¨"]  # Ã© is é, Ã¨ is è
    pairs = [(a, b) for a in "abc/<" for b in "abc/<Ã"] + [("Ã", "©"), ("©", "a"), ("</", "a"), ("ab", "c")]
    return byte_level(pairs, alphabet)


def test_completions_end_where_a_stop_string_ends(model, tokenizer):
    """Every stop string is cut out of what is sampled anyway, so that it must be met: the same ids up to the token in
    which it ends, and that token whole."""
    rng = np.random.default_rng(0)
    one = engine(model, tokenizer=tokenizer)
    vocabulary = vocabulary_bytes(tokenizer, VOCABULARY)
    assert all(vocabulary)
    assert len(tokenizer) == VOCABULARY + 1  # the end of sequence, which the model does not know
    free = one.generate([Request(PROMPT, s, Sampling(max_tokens=60)) for s in range(12)])
    requests, expected = [], []
    for seed, completion in enumerate(free):
        text, ends = b"", []
        for token in completion.tokens:
            text += vocabulary[token]
            ends.append(len(text))
        for _ in range(20):
            at, size = int(rng.integers(len(text))), int(rng.integers(1, 6))
            try:
                stop = text[at : at + size].decode()
            except UnicodeDecodeError:  # not a string
                continue
            end = text.index(stop.encode()) + len(stop.encode())
            expected.append(completion.tokens[: 1 + next(i for i, e in enumerate(ends) if e >= end)].tolist())
            requests.append(Request(PROMPT, seed, Sampling(max_tokens=60), stop=("never met", stop)))
    made = one.generate(requests)
    assert len(requests) > 100
    assert any("é" in r.stop[1] or "è" in r.stop[1] for r in requests)
    same = [c.tokens.tolist() == e for c, e in zip(made, expected, strict=True)]
    # One draw within rounding of a boundary is allowed for; all requests of its seed may differ there.
    assert len({r.seed for r, alike in zip(requests, same, strict=True) if not alike}) <= 1
    assert {c.stop for c, alike in zip(made, same, strict=True) if alike} == {StopReason.STOP}


def test_the_tokenizers_end_of_sequence_ends_too(model):
    tokenizer = byte_level()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
    made = engine(model, tokenizer=tokenizer).generate([Request(PROMPT, s, Sampling(max_tokens=60)) for s in range(40)])
    ended = [c for c in made if c.stop is StopReason.STOP]
    assert ended
    assert all(c.tokens[-1] == 7 and 7 not in c.tokens[:-1] for c in ended)


def test_an_empty_stop_string_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="must not be empty"):
        engine(model, tokenizer=tokenizer).generate([Request(PROMPT, 0, stop=("",))])
