"""What a real vLLM server cannot easily be made to do: hang, fail, lie, lack a route. A small server here does.

Everything else is tested against real servers in tests/vllm.
"""

import json
import re
import shutil
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from memopd.engine import Request
from memopd.engine.vllm import probe, servers
from memopd.engine.vllm.engine import StaleWeights, VllmEngine
from memopd.engine.vllm.start import Interpreter, command, find_vllm
from memopd.engine.vllm.weights import version_of, write
from memopd.models.adapters import add_adapter, new_config, save_adapter
from memopd.types import Sampling, StopReason
from memopd.verify.families import tiny_model

LOGPROB = -0.5


class Letters:
    """A tokenizer: one id a character."""

    def encode(self, text, add_special_tokens=True):
        return [ord(c) % 1000 for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


class Fake:
    """Answers as vLLM 0.32 does, and misbehaves on demand: `before` is called with every request to sample, and may
    raise `Hang`, `Die` or `Fail`, or return another answer."""

    def __init__(self):
        self.lacks = set()
        self.label = "default"
        self.max_length = None
        self.raw = False
        self.before = lambda body: None
        self.answered = []  # the prompt of every completion that was sent
        self.asked = 0
        self.loads = []
        self.adapters = {}  # name to path
        self.refuses_adapters = False
        self.sampled_with = []  # the adapter of every completion; None: the model alone
        self.tokens = lambda body: [(sum(body["token_ids"]) + i) % 900 for i in range(4)]
        self.logprob = LOGPROB
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two writes

            def log_message(self, *args):
                pass

            def handle(self):
                with suppress(ConnectionError):  # the client left, as many tests here make it do
                    super().handle()

            def parse_request(self):
                return super().parse_request() and fake.server is not None  # the dead say nothing

            def do_GET(self):
                if self.path in fake.lacks:
                    return self.say(404, {"detail": "Not Found"})
                answers = {
                    "/health": {},
                    "/version": {"version": "0.32.0"},
                    "/weight_info": {"weight_version": fake.label},
                    "/v1/models": {
                        "data": [
                            {"id": "fake", "root": "fake", "max_model_len": fake.max_length},
                            *({"id": a} for a in fake.adapters),
                        ]
                    },
                }
                if self.path in answers:
                    return self.say(200, answers[self.path])
                return self.say(405, {"detail": "Method Not Allowed"})

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                data = self.rfile.read(length)
                if len(data) < length:
                    raise ConnectionResetError("the client left before it had sent its request")
                body = json.loads(data or "{}")
                if self.path == "/tokenize":
                    return self.say(200, {"tokens": Letters().encode(body["prompt"])})
                if self.path == "/inference/v1/generate":
                    return self.generate(body)
                if self.path == "/update_weight_version":
                    fake.label = body["new_version"]
                if self.path == "/collective_rpc":
                    fake.loads.append(body["kwargs"]["weights_path"])
                if self.path == "/v1/load_lora_adapter":
                    if fake.refuses_adapters:
                        return self.say(500, {"error": {"message": "LoRA rank 9 is greater than max_lora_rank 8."}})
                    if body["lora_name"] in fake.adapters:
                        return self.say(400, {"error": {"message": "already loaded", "code": 400}})
                    fake.adapters[body["lora_name"]] = body["lora_path"]
                    return self.say(200, text=b"Success: added")
                if self.path == "/v1/unload_lora_adapter":
                    del fake.adapters[body["lora_name"]]
                    return self.say(200, text=b"Success: removed")
                return self.say(200, {"success": True})

            def generate(self, body):
                probing = body["sampling_params"].get("ignore_eos")
                adapter = body.get("model")
                if adapter is not None and adapter not in fake.adapters:
                    return self.say(404, {"error": {"message": f"The model {adapter} does not exist.", "code": 404}})
                if not probing:
                    with fake.lock:
                        fake.asked += 1
                    try:
                        if (other := fake.before(body)) is not None:
                            return self.say(200, other)
                    except Hang:
                        time.sleep(3)
                        self.close_connection = True
                        return None
                    except Die:
                        fake.stop()
                        self.close_connection = True
                        return None
                    except Fail as error:
                        wrong = {"error": {"message": "as planned", "code": error.args[0]}}
                        if not body.get("stream"):
                            return self.say(error.args[0], wrong)
                        self.send_response(200)  # as vLLM does: the stream has begun before it looks
                        self.send_header("Content-Type", "text/event-stream")
                        self.end_headers()
                        self.close_connection = True
                        self.wfile.write(f"data: {json.dumps(wrong)}\n\ndata: [DONE]\n\n".encode())
                        return None
                with fake.lock:
                    fake.answered.append(tuple(body["token_ids"]))
                    if not probing:
                        fake.sampled_with.append(adapter)
                tokens = [7] * 8 if probing else fake.tokens(body)
                if not body.get("stream"):
                    return self.say(200, {"choices": [fake.choice(tokens, probing, "length")]})
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.close_connection = True
                for i, token in enumerate(tokens):
                    if token == "die":
                        fake.stop()
                        return None
                    ends = "length" if i == len(tokens) - 1 else None
                    event = {"choices": [fake.choice([token], probing, ends)]}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")
                return None

            def say(self, status, answer=None, text=None):
                text = text or json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.handler = Handler
        self.server = None
        self.start(0)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def choice(self, tokens, probing, ends):
        value = 0.0 if probing and not self.raw else self.logprob
        return {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": t, "logprob": value} for t in tokens]},
            "finish_reason": ends,
            "weight_versions": ends and [{"version": self.label, "start": 0, "end": len(tokens)}],
        }

    def start(self, port):
        self.server = Listener(("127.0.0.1", port), self.handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        with self.lock:
            if self.server is not None:
                server, self.server = self.server, None
                server.socket.close()  # at once: nobody connects any more
                threading.Thread(target=server.shutdown).start()

    def restart(self):
        for _ in range(100):
            try:
                return self.start(int(self.url.rpartition(":")[2]))
            except OSError:  # the old socket is still being listened to
                time.sleep(0.02)
        raise AssertionError("the port is not free again")


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Hang(Exception):
    pass


class Die(Exception):
    pass


class Fail(Exception):
    pass


@pytest.fixture
def fakes():
    made = [Fake(), Fake()]
    yield made
    for fake in made:
        fake.stop()


@pytest.fixture
def connect(fakes):
    engines = []

    def connect(*chosen, **rest):
        urls = [f.url for f in chosen or fakes]
        engines.append(VllmEngine(urls, Letters(), **{"timeout": 1.0, "patience": 2.0, **rest}))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


def test_the_shortest_context_of_the_servers_counts(fakes, connect):
    fakes[0].max_length, fakes[1].max_length = 4096, 1024
    assert connect().max_length == 1024
    fakes[1].lacks.add("/v1/models")
    assert connect().max_length == 4096
    assert connect(fakes[1]).max_length is None


def some(count):
    return [Request(np.array([10 + i]), i, Sampling(max_tokens=4)) for i in range(count)]


def check(requests, completions):
    assert [c.tokens.tolist() for c in completions] == [[10 + i + k for k in range(4)] for i in range(len(requests))]
    assert all(c.stop is StopReason.LENGTH and (c.logprobs == LOGPROB).all() for c in completions)


def test_numbers_may_be_numpys(fakes, connect):
    fakes[0].before = lambda body: sent.append(body["sampling_params"])
    sent = []
    request = Request(np.array([10]), np.int64(7), Sampling(max_tokens=np.int64(4)))
    check(some(1), connect(fakes[0]).generate([request]))
    assert [(p["seed"], p["max_tokens"]) for p in sent] == [(7, 4)]


def once(error):
    """A misfortune that happens to one request only."""
    left = [error]
    lock = threading.Lock()

    def before(body):
        with lock:
            mishap = left.pop() if left else None
        if mishap:
            raise mishap

    return before


@pytest.mark.parametrize("mishap", [Hang(), Fail(500), Fail(503), Fail(429), Die()], ids=repr)
def test_a_request_that_fails_is_done_elsewhere_and_counts_once(fakes, connect, mishap):
    engine = connect()
    fakes[0].before = once(mishap)
    requests = some(40)
    check(requests, engine.generate(requests))
    assert fakes[0].asked + fakes[1].asked >= 41


def test_a_session_delivers_what_the_servers_finish(fakes, connect):
    """Those that are done come although another request hangs; closing ends that one."""
    engine = connect(fakes[0], timeout=30.0)
    first, second, hangs = some(3)
    going = threading.Event()

    def before(body):
        if body["token_ids"] == list(hangs.prompt):
            going.wait(20)

    fakes[0].before = before
    made = {}
    with engine.session() as session:
        session.submit([hangs, first])
        made |= dict(session.wait())
        session.submit([second])
        made |= dict(session.wait())
    going.set()
    assert list(made) == [first, second]
    check([first, second], list(made.values()))
    assert not engine._tasks


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_refuses_is_not_tried_again_and_costs_nobody_else(fakes, connect, stream):
    """A stream is refused after it has begun, with status 200 and an event that says 400."""
    engine = connect(fakes[0])

    def before(body):
        if body["token_ids"] == [10]:
            raise Fail(400)

    fakes[0].before = before
    first, *others = some(4)
    with pytest.raises(ValueError, match=f"{fakes[0].url}/inference/v1/generate: HTTP 400: as planned"):
        engine.submit(first).completion.result(5) if stream else engine.generate([first])
    assert fakes[0].asked == 1
    assert engine._fleet.servers[0].down_since is None
    assert len(engine.generate(others)) == 3


@pytest.mark.parametrize("status", [500, 429])
def test_a_stream_that_fails_is_done_elsewhere(fakes, connect, status):
    engine = connect()
    fakes[0].before = fakes[1].before = once(Fail(status))
    heard = []
    check(some(1), [engine.submit(some(1)[0], heard.append).completion.result(5)])
    assert heard == [10, 11, 12, 13]


def test_a_late_answer_does_not_count_twice(fakes, connect):
    """The first server answers, but after its time: the second one's answer is the one that is returned, alone."""
    engine = connect(timeout=0.3)
    slow = once(None)

    def before(body):
        time.sleep(1.0)
        return slow(body)

    fakes[0].before = before
    fakes[0].logprob = -9.0
    ticket = engine.submit(some(1)[0])
    completion = ticket.completion.result(5)
    assert completion.logprobs.tolist() == [LOGPROB] * 4
    time.sleep(1.2)
    assert fakes[0].answered.count((10,)) == fakes[1].answered.count((10,)) == 1
    assert ticket.completion.result() is completion


def test_work_goes_to_whom_has_least(fakes, connect, monkeypatch):
    monkeypatch.setattr(servers, "AT_ONCE", 4)
    engine = connect(timeout=30)
    fakes[0].before = lambda body: time.sleep(1)
    check(some(60), engine.generate(some(60)))
    assert 4 <= fakes[0].asked < 20
    assert fakes[0].asked + fakes[1].asked == 60


def test_the_only_server_is_waited_for(fakes, connect):
    engine = connect(fakes[0])
    fakes[0].before = once(Die())
    threading.Timer(0.7, fakes[0].restart).start()
    check(some(8), engine.generate(some(8)))
    assert fakes[0].asked > 8  # what died with it was asked again


def test_patience_has_an_end(fakes, connect):
    engine = connect(patience=0.5)
    for fake in fakes:
        fake.stop()
    with pytest.raises(ConnectionError, match=rf"within 0\.5 s: {fakes[0].url}: .*; {fakes[1].url}: "):
        engine.generate(some(4))


def test_a_request_that_kills_whoever_takes_it_is_given_up(fakes, connect):
    engine = connect()

    def before(body):
        if body["token_ids"] == [10]:
            raise Fail(500)

    for fake in fakes:
        fake.before = before
    with pytest.raises(ConnectionError, match=r"failed 5 times, last at .*as planned"):
        engine.generate(some(4))
    check_later = engine.generate(some(4)[1:])
    assert len(check_later) == 3


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"token_ids": [], "finish_reason": "abort"}]},
        {"choices": [{"token_ids": [5], "finish_reason": "stop"}]},
        {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 6, "logprob": -1}]}}]},
        {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}]}}]},
        {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1}]}}]},
        {"error": {"message": "no"}},
        [],
    ],
)
def test_half_an_answer_is_none(fakes, connect, answer):
    """No log-probabilities, those of another token, none that is a number, no end: asked again elsewhere."""
    engine = connect()
    left = [answer]
    fakes[0].before = lambda body: left.pop() if left else None
    requests = some(2)
    check(requests, engine.generate(requests))
    assert not left


def test_a_completion_of_two_policies_is_sampled_again(fakes, connect):
    engine = connect(fakes[0])
    mixed = fakes[0].choice([1, 2], False, "stop")
    mixed["weight_versions"] = [{"version": "1@a", "start": 0, "end": 1}, {"version": "2@b", "start": 1, "end": 2}]
    left = [{"choices": [mixed]}]
    fakes[0].before = lambda body: left.pop() if left else None
    check(some(1), engine.generate(some(1)))
    assert not left
    assert fakes[0].asked == 2


def test_what_was_heard_stays_true_when_the_server_dies(fakes, connect):
    """Sampled again elsewhere with the same seed. Where that goes another way, the completion ends as aborted."""
    fakes[0].tokens = lambda body: [10, 11, "die"]
    engine = connect()
    heard = []
    completion = engine.submit(some(1)[0], heard.append).completion.result(5)
    assert completion.stop is StopReason.LENGTH
    assert heard == completion.tokens.tolist() == [10, 11, 12, 13]

    fakes[0].restart()
    fakes[1].tokens = lambda body: [10, 99, 98, 97]
    fakes[1].before = lambda body: time.sleep(0.3)  # the first one has the request first
    time.sleep(1)
    heard.clear()
    completion = engine.submit(some(1)[0], heard.append).completion.result(5)
    assert heard == completion.tokens.tolist() == [10, 11]
    assert len(completion.logprobs) == 2
    assert completion.stop is StopReason.ABORTED


def test_a_listener_that_fails_fails_its_own_request_only(fakes, connect):
    engine = connect()

    def heard(token):
        raise KeyError("listener")

    with pytest.raises(KeyError, match="listener"):
        engine.submit(some(1)[0], heard).completion.result(5)
    check(some(3), engine.generate(some(3)))


def test_closing_ends_what_is_under_way(fakes, connect):
    engine = connect(timeout=30)
    for fake in fakes:
        fake.before = lambda body: time.sleep(2)
    tickets = [engine.submit(r) for r in some(3)]
    tickets[0].cancel()  # perhaps before it began
    assert tickets[0].completion.result(5).stop is StopReason.ABORTED
    engine.close()
    assert [t.completion.result(1).stop for t in tickets] == [StopReason.ABORTED] * 3
    tickets[1].cancel()
    engine.close()
    for use in (lambda: engine.generate(some(1)), lambda: engine.verify(agree, [[1]], tolerance=1.0)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_nobody_is_left_waiting_by_a_close(fakes, connect):
    """Requests from another thread: each is answered, aborted or refused, whenever the end comes."""
    for delay in np.linspace(0, 0.02, 5):
        engine, tickets = connect(), []

        def ask(engine=engine, tickets=tickets):
            with suppress(ValueError):  # it is closed
                while True:
                    tickets.append(engine.submit(some(1)[0]))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        time.sleep(delay)
        engine.close()
        asking.join(10)
        assert not asking.is_alive()
        assert all(t.completion.result(1).stop in (StopReason.LENGTH, StopReason.ABORTED) for t in tickets)


# What is missing is named, with what to add


def test_no_server(fakes, connect):
    fakes[0].stop()
    with pytest.raises(ConnectionError, match=f"{fakes[0].url}: no policy server answers .*memopd serve policy"):
        connect()


@pytest.mark.parametrize(
    ("route", "said"),
    [("/inference/v1/generate", "--enable-scale-out"), ("/version", "not a vLLM server")],
)
def test_a_missing_route(fakes, connect, route, said):
    fakes[1].lacks.add(route)
    with pytest.raises(ValueError, match=f"{fakes[1].url} .*{said}"):
        connect()


def test_log_probabilities_of_another_distribution(fakes, connect):
    fakes[1].raw = True
    with pytest.raises(ValueError, match=f"{fakes[1].url} .*--logprobs-mode processed_logprobs"):
        connect()


def test_another_tokenizer(fakes):
    class Other(Letters):
        def encode(self, text, add_special_tokens=True):
            return [1, 2, 3]

    with pytest.raises(ValueError, match=f"{fakes[0].url} serves fake, whose tokenizer is not ours"):
        VllmEngine([fakes[0].url], Other())


@pytest.mark.parametrize("urls", [[], ["localhost:8001"], ["http://a", "http://a/v1/"]])
def test_bad_addresses(urls):
    with pytest.raises(ValueError, match=r"server|twice"):
        VllmEngine(urls, Letters())


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80O1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://:8001",
        "http://[::1",
        "http://xn--a",
    ],
)
def test_a_mistyped_address_is_named_in_one_line(url):
    said = f"{url!r} is not the address of a server; one looks like http://127.0.0.1:8001"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        VllmEngine([url], Letters())


@pytest.mark.parametrize(("seconds", "timeout"), [(2, 60.0), (60, 2.0)])
def test_a_server_that_hangs_in_the_first_check_is_soon_given_up(fakes, connect, monkeypatch, seconds, timeout):
    monkeypatch.setattr(probe, "_SECONDS", seconds)
    generate, over = fakes[0].handler.generate, threading.Event()

    def late(self, body):
        over.wait(20)
        return generate(self, body)

    monkeypatch.setattr(fakes[0].handler, "generate", late)
    with pytest.raises(ConnectionError, match=f"{fakes[0].url}: no policy server answers .*/generate: ReadTimeout"):
        connect(fakes[0], timeout=timeout)
    over.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [502, 200])
def test_a_page_that_is_not_utf_8_is_a_failure_like_another(fakes, connect, monkeypatch, status, stream):
    """As a proxy in front of the server sends it."""
    engine, page = connect(fakes[0]), "<html>Passerelle incorrecte : r\u00e9essayez</html>".encode("latin-1")
    generate, left = fakes[0].handler.generate, [page]

    def answer(self, body):
        return self.say(status, text=left.pop()) if left else generate(self, body)

    monkeypatch.setattr(fakes[0].handler, "generate", answer)
    made = engine.submit(some(1)[0]).completion.result(20) if stream else engine.generate(some(1))[0]
    check(some(1), [made])
    assert not left


def test_servers_that_cannot_be_updated_say_so(fakes, connect, tmp_path):
    fakes[0].lacks |= {"/weight_info", "/collective_rpc"}
    engine = connect(fakes[0])
    check(some(2), engine.generate(some(2)))  # good enough to sample from
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=f"{fakes[0].url} has no /collective_rpc: .*VLLM_SERVER_DEV_MODE=1"):
        engine.update(tmp_path, version=1)


# Weights


def agree(pairs, temperature):
    return [np.full(len(c), LOGPROB) for _, c in pairs]


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_servers_that_disagree_are_not_mixed(fakes, connect, checkpoint):
    fakes[1].label = "3@elsewhere"
    with pytest.raises(ValueError, match=f"different weights .*{fakes[1].url}: '3@elsewhere'"):
        connect()
    engine = connect(weights=checkpoint, version=4)
    assert engine.verify(agree, [[1, 2]], tolerance=1e-6) == {f.url: 0.0 for f in fakes}
    assert {c.policy_version for c in engine.generate(some(8))} == {4}


def test_servers_that_will_be_updated_may_hold_anything(fakes, connect, tmp_path):
    """As when a run is resumed after one of its servers was restarted. A second trainer process learns of the update
    from the servers."""
    fakes[1].label = "3@elsewhere"
    engine, other = connect(folder=tmp_path), connect(folder=tmp_path)
    with pytest.raises(ValueError, match="not verified: call update, then verify"):
        engine.generate(some(1))
    engine.update({"w": torch.ones(2)}, version=5)
    for one in (engine, other):
        assert one.verify(agree, [[1, 2]], tolerance=1e-6) == {f.url: 0.0 for f in fakes}
        assert {c.policy_version for c in one.generate(some(8))} == {5}


def test_a_server_that_comes_back_gets_the_weights_before_requests(fakes, connect, checkpoint):
    engine = connect(weights=checkpoint, version=4)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    fakes[0].before = once(Die())
    check(some(20), engine.generate(some(20)))
    fakes[0].label = "default"
    fakes[0].loads.clear()
    fakes[0].restart()
    limit = time.monotonic() + 60
    while fakes[0].label == "default":
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert fakes[0].loads == [str(checkpoint)]
    assert fakes[0].label == f"4@{checkpoint}"


def test_a_server_that_comes_back_stale_stops_the_run_by_name(fakes, connect, checkpoint):
    """It says that it loaded the weights, and answers what was verified before otherwise."""
    engine = connect(weights=checkpoint, version=4)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    fakes[0].before = once(Die())
    check(some(20), engine.generate(some(20)))
    fakes[0].logprob = LOGPROB - 1
    fakes[0].restart()
    with pytest.raises(StaleWeights, match=fakes[0].url) as caught:  # noqa: PT012
        for _ in range(200):
            engine.generate(some(4))
            time.sleep(0.05)
    assert caught.value.gap == 1
    engine.update(checkpoint, version=5)  # a new chance for all
    fakes[0].logprob = LOGPROB
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    fakes[0].asked = 0
    limit = time.monotonic() + 60
    while not fakes[0].asked:
        assert time.monotonic() < limit
        assert {c.policy_version for c in engine.generate(some(4))} == {5}


def test_a_server_that_is_down_during_an_update_gets_it_later(fakes, connect, checkpoint):
    engine = connect(weights=checkpoint, version=1, patience=20.0)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    fakes[0].stop()
    engine.generate(some(4))
    engine.update(checkpoint, version=2)
    assert set(engine.verify(agree, [[1, 2]], tolerance=1e-6)) == {fakes[1].url}
    fakes[0].restart()
    limit = time.monotonic() + 60
    while not fakes[0].label.startswith("2@"):
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture
def adapter(tmp_path):
    """Only the names matter: the server that reads them is real in tests/vllm."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_an_adapter_is_loaded_under_a_new_name_and_the_old_one_goes(fakes, connect, adapter):
    engine = connect(fakes[0], adapter=adapter, version=3)
    engine.generate(some(2))
    name = f"3@adapter:{adapter}"
    assert fakes[0].adapters == {name: str(adapter)}
    assert fakes[0].sampled_with == [name] * 2
    assert fakes[0].label == name
    assert not fakes[0].loads  # the weights stay
    engine.update(adapter, version=4)
    with pytest.raises(ValueError, match="not verified"):  # only the first adapter is taken as it is
        engine.generate(some(1))
    assert list(fakes[0].adapters) == [f"4@adapter:{adapter}"]
    engine.update(adapter, version=4)  # the folder may have changed, so the server must read it again
    assert list(fakes[0].adapters) == [f"4@adapter:{adapter}"]


@pytest.mark.parametrize("label", ["default", None], ids=["restarted", "unloaded"])
def test_a_server_that_lost_its_adapter_gets_it_before_requests(fakes, connect, adapter, label):
    """A restarted server does not know the adapter. Its refusal is a reason to load it, not the caller's mistake."""
    engine = connect(fakes[0], adapter=adapter)
    engine.generate(some(1))
    fakes[0].adapters, fakes[0].label = {}, label or fakes[0].label
    assert [c.stop for c in engine.generate(some(2))] == [StopReason.LENGTH] * 2
    assert fakes[0].sampled_with == [f"0@adapter:{adapter}"] * 3


def names(folder):
    return sorted(f.name for f in folder.iterdir())


def test_what_was_served_from_the_engines_folder_goes_after_the_next_update(fakes, connect, adapter, tmp_path):
    """As in training, also after a resume: the second engine finds what the first one left."""
    base, served = tmp_path / "base", tmp_path / "served"
    model = tiny_model("qwen2")
    model.save_pretrained(base)
    add_adapter(model, new_config(2, 4, ("q_proj",)), "student", trainable=True)
    for engine in (connect(fakes[0], folder=served), connect(fakes[0], folder=served)):
        engine.update({"w": torch.ones(2)}, 7)
        assert names(served) == ["weights-7"]
        for version in (8, 9):
            save_adapter(served / f"adapter-{version}", model, "student", str(base), None)  # as training does
            engine.update(served / f"adapter-{version}", version)
            assert names(served) == [f"adapter-{version}"]
    engine.update(adapter, version=10)  # of the user
    assert adapter.exists()
    assert names(served) == ["adapter-9"]


def test_folders_of_the_user_in_the_engines_folder_stay(fakes, connect, adapter, tmp_path):
    """Whatever they are called: only what MemOPD wrote for servers is removed."""
    home = tmp_path / "home"
    for name in ("adapter-1", "adapter-2", "weights-best"):
        shutil.copytree(adapter, home / name)
    (home / "adapter-2" / "memopd.json").write_text('{"tokenizer_digest": "1a"}')  # a trained one, to keep
    (home / "weights-0").mkdir()
    save_file({"w": torch.ones(2)}, home / "weights-0" / "model.safetensors", metadata={"format": "pt"})
    (home / "weights-none").mkdir()
    before = names(home)
    engine = connect(fakes[0], folder=home)
    engine.update(home / "adapter-2", 2)
    assert names(home) == before
    engine.update({"w": torch.ones(2)}, 3)
    engine.update({"w": torch.ones(2)}, 4)
    assert names(home) == sorted([*before, "weights-4"])


def test_whoever_gives_no_weights_samples_with_the_adapter_that_is_there(fakes, connect, adapter, caplog):
    follower = connect(fakes[0])
    assert [c.policy_version for c in follower.generate(some(1))] == [0]
    trainer = connect(fakes[0], adapter=adapter, version=1)
    assert [c.policy_version for c in follower.generate(some(1))] == [1]
    # The bare model's answer came with an adapter's label, so it was not taken.
    assert fakes[0].sampled_with == [None, None, f"1@adapter:{adapter}"]
    trainer.update(adapter, version=2)
    assert [c.policy_version for c in follower.generate(some(2))] == [2, 2]
    assert fakes[0].sampled_with[3:] == [f"2@adapter:{adapter}"] * 2
    caplog.clear()
    early = connect(fakes[0], folder=adapter.parent)  # as a rank that updates nothing: it was there before the update
    trainer.update(adapter, version=3)
    early.verify(lambda pairs, _: [np.full(len(c), LOGPROB) for _, c in pairs], [[1, 2]], tolerance=1e-6)
    assert early.version == 3
    assert fakes[0].sampled_with[5:] == [f"3@adapter:{adapter}"]
    assert not any("down" in r.message for r in caplog.records)  # it asked for the label first


def test_a_server_that_takes_no_adapter_says_what_to_do(fakes, connect, adapter):
    fakes[1].lacks.add("/v1/load_lora_adapter")
    with pytest.raises(ValueError, match=f"{fakes[1].url} takes no adapters: .*--lora-rank"):
        connect(adapter=adapter)
    fakes[0].refuses_adapters = True
    with pytest.raises(ValueError, match=f"{fakes[0].url} refuses the adapter {adapter}: .*max_lora_rank 8"):
        connect(fakes[0], adapter=adapter)


def test_nobody_samples_with_weights_that_are_not_verified(fakes, connect, checkpoint):
    """Not even a request that waited through the update."""
    engine = connect(fakes[0], weights=checkpoint, version=1, timeout=30)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    fakes[0].before = lambda body: time.sleep(0.5) if body["token_ids"] == [10] else None
    engine.submit(some(1)[0])
    time.sleep(0.2)
    updating = threading.Thread(target=engine.update, args=(checkpoint, 2))
    updating.start()  # waits for the request
    time.sleep(0.1)
    with pytest.raises(ValueError, match="version 1 are not verified"):
        engine.submit(some(2)[1])
    updating.join()
    asked = fakes[0].asked
    engine._verified = True  # a request that came just before the update
    waiting = engine.submit(some(2)[1])
    engine._verified = False
    time.sleep(0.3)
    assert fakes[0].asked == asked
    with pytest.raises(StaleWeights):
        engine.verify(lambda pairs, _: [np.zeros(4)], [[1, 2]], tolerance=1e-6)
    with pytest.raises(StaleWeights):
        waiting.completion.result(5)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)  # the score was wrong, not the server
    assert engine.generate(some(2)[1:])[0].policy_version == 2
    engine.update(checkpoint, 3)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    assert engine.generate(some(2)[1:])[0].policy_version == 3


def test_while_one_thread_updates_the_requests_of_others_wait(fakes, connect, checkpoint):
    """A request that is open ends first, with the old weights. One that comes in between gets the new ones."""
    fakes[0].before = lambda body: None if go_on.wait(30) else {}
    go_on, updating = threading.Event(), threading.Event()
    engine = connect(fakes[0], weights=checkpoint, version=1, timeout=30)
    go_on.set()
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    go_on.clear()
    first, second, third = some(3)
    versions = {}

    def sample(name, request):
        versions[name] = engine.generate([request])[0].policy_version

    def update():
        with engine.updating():
            assert go_on.is_set()  # the first request was answered; its thread may not have seen that yet
            updating.set()
            engine.update(checkpoint, version=2)
            with pytest.raises(ValueError, match="not verified"):  # the thread that updates must verify, as ever
                engine.generate([third])
            threads[2].start()
            threads[2].join(0.1)
            assert threads[2].is_alive()
            engine.verify(agree, [[1, 2]], tolerance=1e-6)

    threads = [
        threading.Thread(target=sample, args=("open", first)),
        threading.Thread(target=update),
        threading.Thread(target=sample, args=("later", second)),
    ]
    threads[0].start()
    while not engine._fleet.servers[0].outstanding:
        time.sleep(0.005)
    threads[1].start()
    while engine._fleet._running:
        time.sleep(0.005)
    assert not updating.wait(0.1)  # the first request is still open
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert versions == {"open": 1, "later": 2}
    with engine.updating():
        pass  # a block without an update changes nothing
    assert engine.generate([third])[0].policy_version == 2


def test_an_error_before_the_weights_change_leaves_the_servers_as_they_were(fakes, connect, checkpoint):
    engine = connect(fakes[0], weights=checkpoint, version=1)
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    with pytest.raises(OSError, match="disk full"), engine.updating():
        raise OSError("disk full")
    assert engine.submit(some(1)[0]).completion.result(10).policy_version == 1
    with pytest.raises(OSError, match="disk full"), engine.updating():  # noqa: PT012 (only `verify` ends this one)
        engine.update(checkpoint, version=2)
        raise OSError("disk full")
    with pytest.raises(ValueError, match="version 2 are not verified"):
        engine.submit(some(1)[0])
    engine.verify(agree, [[1, 2]], tolerance=1e-6)
    assert engine.submit(some(1)[0]).completion.result(10).policy_version == 2
    with engine.updating():
        engine.close()  # no error at the end of the block


def test_a_score_of_the_wrong_length_is_said(fakes, connect):
    engine = connect()
    with pytest.raises(ValueError, match="score: 1 results for 2 pairs"):
        engine.verify(lambda pairs, _: [np.zeros(4)], [[1, 2]], tolerance=1.0)
    with pytest.raises(ValueError, match=r"score: pair 0 has 4 sampled tokens, got \(3,\)"):
        engine.verify(lambda pairs, _: [np.zeros(3)] * 2, [[1, 2]], tolerance=1.0)
    with pytest.raises(ValueError, match="at least one prompt"):
        engine.verify(agree, [], tolerance=1.0)


def test_labels():
    assert version_of("default") == version_of(None) == 0
    assert version_of("12@/a/b@c") == 12
    with pytest.raises(ValueError, match="'theirs'"):
        version_of("theirs")


def test_a_tied_head_is_written_once(tmp_path):
    import torch
    from safetensors.torch import load_file

    tied = torch.arange(6.0).reshape(2, 3)
    home = write({"embed": tied, "head": tied, "other": torch.ones(2).expand(3, 2)}, tmp_path, 7)
    written = load_file(home / "model.safetensors")
    assert set(written) == {"embed", "other"}
    assert written["other"].shape == (3, 2)
    assert home.name == "weights-7"
    assert len(list(home.iterdir())) == 1


# Starting one


def test_the_command_that_starts_a_server():
    line, environment = command(Interpreter("py", on_cpu=True), "m", "127.0.0.1", 8001, "auto", ["--max-num-seqs", "9"])
    text = " ".join(line)
    for flag in ("--logprobs-mode processed_logprobs", "--enable-scale-out", "--no-enable-chunked-prefill"):
        assert flag in text
    assert text.endswith("--max-num-seqs 9")
    assert environment == {"VLLM_SERVER_DEV_MODE": "1"}
    assert "lora" not in text
    line, environment = command(Interpreter("py", on_cpu=True), "m", "127.0.0.1", 8001, "auto", lora_rank=9)
    assert "--enable-lora --max-lora-rank 16" in " ".join(line)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(ValueError, match="--lora-rank 513"):
        command(Interpreter("py", on_cpu=True), "m", "127.0.0.1", 8001, "auto", lora_rank=513)
    assert "chunked" not in " ".join(command(Interpreter("py", on_cpu=False), "m", "h", 1, "auto")[0])


def test_an_interpreter_without_vllm_is_named(tmp_path):
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 3\n")
    empty.chmod(0o755)
    with pytest.raises(ValueError, match=f"{empty} has no vLLM: pip install"):
        find_vllm(empty)
    with pytest.raises(ValueError, match="not an interpreter"):
        find_vllm(Path(tmp_path / "nothing"))


def test_the_verb_passes_on_what_follows_the_dashes(monkeypatch, tmp_path):
    import typer
    from typer.testing import CliRunner

    from memopd.cli import policy
    from memopd.engine.vllm import start

    app = typer.Typer()
    policy.register(app)
    started = []
    monkeypatch.setattr(start, "find_vllm", lambda python: Interpreter("py", on_cpu=False))
    monkeypatch.setattr(start, "exec_server", lambda line, environment: started.append(line))
    refused = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(refused.exception, ValueError)
    assert "no config.json" in str(refused.exception)
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = [str(tmp_path), "--port", port, "--", "--max-num-seqs", "64"]
        assert f"port {port} of 127.0.0.1 is in use" in str(CliRunner().invoke(app, line).exception)
    assert started == []
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert started[0][-2:] == ["--max-num-seqs", "64"]
    assert f"--port {port} --dtype auto" in " ".join(started[0])
