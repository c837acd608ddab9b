"""Parts for the gateway's tests: a small tokenizer, a scripted engine, and a server in a thread.

As a program, it is a server for tests that kill it:  gateway_parts.py STORE PORT
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai

from memopd import http
from memopd.engine.protocol import Completion, Request, Ticket
from memopd.gateway.server import create_app
from memopd.types import StopReason
from memopd.world.tokenizer import train_tokenizer

MODEL = "tiny"
Say = Callable[[Request], "str | Sequence[int]"]


@cache
def tokenizer() -> Any:
    words = "the river flows past the old town and the people of the town search for the answer in the memory of it"
    return train_tokenizer([f"{words} {n} <search>{w}</search>" for n, w in enumerate(words.split())], 320)


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def letters(text: str) -> list[int]:
    """The text byte by byte: sampled ids that encoding the text again does not give."""
    return [id for letter in text for id in encode(letter)]


class Scripted:
    """An engine that samples what `say` returns, one id per `pace` seconds, each request in its own thread."""

    def __init__(self, say: Say, pace: float = 0.0) -> None:
        self.tokenizer = tokenizer()
        self.version = 3
        self.requests: list[Request] = []
        self.cancelled = 0
        self.go = threading.Event()  # while it is cleared, requests that are `held` sample nothing
        self.go.set()
        self.held: Callable[[Request], bool] = lambda request: True
        self._say, self._pace = say, pace

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.submit(request).completion.result() for request in requests]

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        self.requests.append(request)
        said = self._say(request)
        ids = [*encode(said), self.tokenizer.eos_token_id] if isinstance(said, str) else list(said)
        future: Future[Completion] = Future()
        stopped = threading.Event()

        def cancel() -> None:
            self.cancelled += not stopped.is_set()
            stopped.set()

        def run() -> None:
            try:
                future.set_result(self._run(request, ids, on_token or (lambda id: None), stopped))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return Ticket(future, cancel)

    def _run(self, request: Request, ids: list[int], on_token: Callable[[int], None], stopped: Any) -> Completion:
        sampled: list[int] = []
        reason = StopReason.STOP
        for id in ids:
            while self.held(request) and not (self.go.wait(0.005) or stopped.is_set()):
                pass
            if stopped.wait(self._pace) if self._pace else stopped.is_set():
                reason = StopReason.ABORTED
                break
            if id < 0:
                raise RuntimeError("the engine broke")
            sampled.append(id)
            on_token(id)
            if any(stop in self.tokenizer.decode(sampled) for stop in request.stop):
                break
            if len(sampled) == request.sampling.max_tokens:
                reason = StopReason.LENGTH
                break
        logprobs = -np.arange(1, len(sampled) + 1) / 8
        return Completion(np.asarray(sampled, np.int32), logprobs, reason, self.version)

    def close(self) -> None: ...


@contextmanager
def serving(engine: Any, store: Path, protocol: type[http.Protocol] = http.Protocol, **settings: Any) -> Iterator[str]:
    """The address of a gateway in this process."""
    app = create_app(engine, store, model=MODEL, **{"store_delay": 0.05} | settings)
    server = http.server(app, protocol, timeout_graceful_shutdown=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def client(url: str, episode: str, token: str = "none", **settings: Any) -> openai.OpenAI:
    base = f"{url}/episodes/{episode}/v1"
    return openai.OpenAI(base_url=base, api_key=token, **{"max_retries": 0, "timeout": 30} | settings)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


if __name__ == "__main__":
    # Each answer names its prompt, so that a test can compare the records with the answers.
    app = create_app(
        Scripted(lambda request: f"the answer to {request.prompt.sum()} in {len(request.prompt)}", pace=0.001),
        Path(sys.argv[1]),
        model=MODEL,
        store_delay=0.1,
    )
    http.server(app, host="127.0.0.1", port=int(sys.argv[2])).run()
