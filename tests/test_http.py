"""Both servers over real sockets: pages of other sites, strangers, and clients that never finish a request."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from browser import Browser
from serving import serving
from transformers import Qwen2Config, Qwen2ForCausalLM

from memopd import http
from memopd.engine.local import LocalEngine
from memopd.gateway import server as gateway
from memopd.retrieval import Hit, Passage, open_index
from memopd.retrieval import server as retrieval
from memopd.world.tokenizer import train_tokenizer

JSON = {"content-type": "application/json"}
CALL = "/episodes/e1/v1/completions", {"model": "tiny", "prompt": "the town", "max_tokens": 1}
SEARCH = "/retrieve", {"queries": ["the town"]}


class OnePassage:
    def search(self, queries, k):
        return [[Hit(Passage("1", "Town", "by the river"), 1.0)] for _ in queries]


@pytest.fixture(scope="module")
def engine():
    tokenizer = train_tokenizer(["the river flows past the old town"] * 9, 280)
    config = Qwen2Config(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    made = LocalEngine(Qwen2ForCausalLM(config).eval(), tokenizer, slots=4)
    yield made
    made.close()


@pytest.fixture(params=["gateway", "retrieval"])
def server(request, engine, tmp_path):
    """(a function that makes the app, a path, a good body for it)."""
    if request.param == "gateway":
        return partial(gateway.create_app, engine, tmp_path, model="tiny"), *CALL
    return partial(retrieval.create_app, OnePassage()), *SEARCH


# ---- who may ask


CASES = [
    ({}, 200),
    ({"content-type": "application/json; charset=utf-8"}, 200),
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": ""}, 415),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "http://127.0.0.1"}, 403),  # another port is another site
    ({"origin": "null"}, 403),
    ({"origin": "http://["}, 403),
    ({"origin": "http://localhost:1", "host": "localhost:1"}, 200),
    ({"host": "localhost"}, 200),
    ({"host": "127.0.0.2:80"}, 200),
    ({"host": "[::1]:80"}, 200),
    ({"host": "evil.example"}, 421),
    ({"host": "localhost.evil.example"}, 421),
    ({"host": "10.0.0.1"}, 421),
    ({"host": "["}, 421),
]


def test_which_requests_are_served(server):
    create, path, body = server
    with serving(create()) as url:
        for headers, status in CASES:
            answer = httpx.post(url + path, content=json.dumps(body), headers=JSON | headers)
            assert answer.status_code == status, (headers, answer.text)
            assert "\n" not in answer.text
        assert httpx.post(url + path, json=body, headers={"origin": url}).status_code == 200


def test_a_preflight_is_not_granted(server):
    create, path, _ = server
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with serving(create()) as url:
        for origin, status in (("http://evil.example", 403), (url, 405)):
            answer = httpx.options(url + path, headers=asks | {"origin": origin})
            assert answer.status_code == status
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_other_machines_need_the_token(server):
    create, path, body = server
    for host in ("0.0.0.0", "::", "192.0.2.1", "box.example"):
        with pytest.raises(
            ValueError, match=r"set MEMOPD_[A-Z]+_TOKEN to a secret, or use --host 127.0.0.1: other mach"
        ):
            create(host=host)
    key = {"authorization": "Bearer secret"}
    with serving(create(token="secret", host="box.example")) as url:
        post = partial(httpx.post, url + path, json=body)
        assert post(headers=key | {"host": "box.example:80"}).status_code == 200
        assert post(headers=key | {"host": "other.example"}).status_code == 421
        assert post(headers={"host": "box.example"}).status_code == 401
        assert post(headers={"authorization": b"Bearer \xe9"}).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
    with serving(create(token="secret", host="0.0.0.0")) as url:
        post = partial(httpx.post, url + path, json=body)
        assert post(headers=key | {"host": "any.example"}).status_code == 200
        assert post(headers={"host": "any.example"}).status_code == 401
        assert post(headers=key | {"origin": "http://evil.example"}).status_code == 403


def test_our_client_sends_the_token(monkeypatch):
    with serving(retrieval.create_app(OnePassage(), token="secret")) as url:
        with pytest.raises(ValueError, match=r"status 401: .*wrong or missing bearer token"):
            open_index(url).search(["town"], 3)
        monkeypatch.setenv("MEMOPD_RETRIEVAL_TOKEN", "secret")
        assert open_index(url).search(["town"], 3)[0][0].passage.title == "Town"


ATTACK = """
const body = JSON.stringify({reward: -999}), to = TARGET + '/episodes/e1/reward';
const tries = [
    fetch(to, {method: 'POST', mode: 'no-cors', body}),
    fetch(to, {method: 'POST', mode: 'no-cors', body: new Blob([body])}),
    fetch(to, {method: 'POST', headers: {'content-type': 'application/json'}, body}),
    fetch(TARGET + '/episodes/e1').then(r => r.text()),
];
window.seen = null;
Promise.allSettled(tries).then(all => { window.seen = all.map(t => t.value?.status ?? t.value); });
"""


def test_pages_in_a_real_browser(engine, tmp_path):
    """A page of another site and one whose name resolves to this machine reach nothing; the server's own page does."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<title>evil</title>")
    site = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path / "site"))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    with (
        serving(gateway.create_app(engine, tmp_path / "store", model="tiny")) as url,
        Browser("--host-resolver-rules=MAP evil.example 127.0.0.1") as page,
    ):
        port = url.rpartition(":")[2]
        path, body = CALL
        assert httpx.post(url + path, json=body).status_code == 200

        def attack(where, target):
            page.send("Page.navigate", url=where)
            page.until(f"location.href.startsWith({json.dumps(where)}) && document.readyState === 'complete'")
            page.run(ATTACK.replace("TARGET", json.dumps(target)))
            page.until("window.seen !== null")
            return page.run("window.seen"), httpx.get(f"{url}/episodes/e1").json()["finished"]

        foreign = f"http://127.0.0.1:{site.server_address[1]}/"
        assert attack(foreign, url) == (
            [0, 0, None, None],
            False,
        )  # twice no answer that it may read, twice none at all
        rebound = f"http://evil.example:{port}"
        assert attack(f"{rebound}/health", rebound) == ([421, 421, 421, page.run("window.seen[3]")], False)
        assert "wrong_host" in page.run("window.seen[3]")
        (first, second, third, text), finished = attack(f"{url}/health", url)  # so the attack itself works
        assert (first, second, third, finished) == (415, 415, 200, True)
        assert "e1" in text
    site.shutdown()
    site.server_close()


# ---- where they listen


def test_a_port_is_open_before_a_server_says_so():
    with http.listening("127.0.0.1", 0) as (first, url):
        port = first.getsockname()[1]
        assert url == f"http://127.0.0.1:{port}"
        taken = rf"^port {port} of 127\.0\.0\.1 is in use: choose another with --port$"
        with pytest.raises(ValueError, match=taken), http.listening("127.0.0.1", port):
            pass
    with http.listening("127.0.0.1", port) as (_, again):  # it was closed
        assert again == url
    with (
        pytest.raises(ValueError, match=r"^cannot listen on port 1 of 192\.0\.2\.1: "),
        http.listening("192.0.2.1", 1),
    ):
        pass


@pytest.mark.parametrize("verb", [["gateway", "--store", "s"], ["serve", "policy", "m"], ["serve", "retrieval", "i"]])
def test_a_port_is_a_port(verb, call_main):
    for port in ("-1", "65536", "99999"):
        status, out, err = call_main(*verb, "--port", port)
        assert (status, out) == (2, "")
        assert "Invalid value for '--port'" in err
        assert "Traceback" not in err


# ---- how long a client may take


def limited(**limits):
    return type("Limited", (http.Protocol,), limits)


def half_requests(url, path, count):
    """Half of them stop inside their headers, a quarter inside their body, a quarter before the first byte."""
    port = int(url.rpartition(":")[2])
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n".encode()
    parts = [head, head + b"x-slow: ", head + b"content-length: 100\r\n\r\n{", b""]
    opened = []
    for n in range(count):
        opened.append(socket.create_connection(("127.0.0.1", port)))
        opened[-1].sendall(parts[n % 4])
    return opened


def still_open(sockets):
    count = 0
    for one in sockets:
        one.setblocking(False)
        try:
            while one.recv(4096):  # a 408, then the end
                pass
        except BlockingIOError:
            count += 1
        except ConnectionError:
            pass
    return count


def test_half_requests_end_and_good_ones_are_served(server):
    create, path, body = server
    count = 240
    with serving(create(), limited(header_seconds=1.0, request_seconds=2.0)) as url:
        slow = half_requests(url, path, count)
        assert still_open(slow[-8:]) == 8
        end = time.monotonic() + 60
        with httpx.Client(timeout=30) as http_client:
            while still_open(slow):
                assert http_client.post(url + path, json=body).status_code == 200
                for one in slow[::8]:
                    one.setblocking(True)
                    with suppress(OSError):
                        one.sendall(b" ")  # a byte now and then does not help
                assert time.monotonic() < end, still_open(slow)
                time.sleep(0.1)
        for one in slow:
            one.close()


def test_beyond_the_most_connections_the_one_that_waited_longest_ends(server):
    """No time limit is needed for it, and neither the new connection nor one that is being used has to go."""
    create, path, body = server
    protocol = limited(header_seconds=600.0, request_seconds=600.0, most=40)
    with serving(create(), protocol) as url, httpx.Client(timeout=30) as http_client:
        slow = half_requests(url, path, 300)
        for _ in range(3):
            assert http_client.post(url + path, json=body).status_code == 200
        left = [still_open([one]) for one in slow]
        assert sum(left) == 39
        assert sum(left[-39:]) == 39  # the newest
        for one in slow:
            one.close()


async def echo_slowly(scope, receive, send):
    """Reads the body, then sends ten parts in a second."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for n in range(10):
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"%d" % n, "more_body": n < 9})


def test_answers_may_take_longer_than_requests():
    with serving(echo_slowly, limited(header_seconds=0.3, request_seconds=0.3, most=1)) as url:
        with httpx.Client(timeout=30) as http_client:
            for _ in range(2):
                assert http_client.post(url, content=b"x" * 100_000).text == "0123456789"
        busy = threading.Thread(target=lambda: texts.append(httpx.post(url, timeout=30).text))
        texts: list[str] = []
        busy.start()
        time.sleep(0.4)
        with pytest.raises(httpx.TransportError):  # the only connection is being answered
            httpx.get(url)
        busy.join()
        assert texts == ["0123456789"]
        # Two requests at once on one connection: the second begins when the first was answered.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as one:
            one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            one.settimeout(30)
            received = b""
            while received.count(b"9\r\n0\r\n") < 2:
                received += one.recv(4096)


def test_a_body_that_follows_an_early_answer_must_end_too():
    """The application refuses without reading; the client goes on sending, a byte at a time."""

    async def refuse(scope, receive, send):
        if scope["type"] == "http":
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body"})

    with (
        serving(refuse, limited(header_seconds=0.5, request_seconds=1.0)) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as one,
    ):
        one.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        end = time.monotonic() + 30
        while still_open([one]):
            assert time.monotonic() < end
            one.setblocking(True)
            with suppress(OSError):
                one.sendall(b"x")
            time.sleep(0.05)
