"""A scripted engine: it says given tokens, with log-probabilities, where a small model would not call a tool.

In a test:

    engine = Scripted(in_turn([CALL, "It is 4."]), tokenizer)     # each episode hears the sayings in turn
    with serving(engine, tmp_path, model="tiny") as url: ...      # a real gateway, in a thread of this process

As a program, it starts a real gateway in front of such an engine, prints its address, and serves until it is killed:

    python tests/scripted.py --tokenizer DIR --script SAYINGS.json --store DIR [--port 0] [--model DIR] [--name tiny]

SAYINGS.json is a list. Its items are texts, which each episode hears in turn (the last one again and again), or pairs
[pattern, text]: then the first pair whose regular expression is found in the prompt's text decides. A saying may also
be a list of token ids, which are then sampled as they are. With --model, the log-probabilities are those of that model.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memopd import http
from memopd.engine.guide import guides_of
from memopd.engine.protocol import Completion, Request, Ticket
from memopd.gateway.server import create_app
from memopd.types import StopReason

Saying = str | Sequence[int]
Say = Callable[[Request], Saying]

# Of a tokenizer that reads its own answers.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
    },
}


class Scripted:
    """An engine that samples what `say` returns, one id per `pace` seconds, each request in its own thread.

    A text is encoded, and the end-of-sequence token follows it; ids are sampled as they are. Without a `model`, token n
    has the log-probability -(n + 1) / 8. With one, the tokens have the probabilities that it gives them, as if it had
    sampled them. If a request has a grammar and the script does not follow it, the request is refused.
    """

    def __init__(
        self, say: Say, tokenizer: Any, pace: float = 0.0, model: Any = None, max_length: int | None = None
    ) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.version = 3
        self.requests: list[Request] = []
        self.cancelled = 0
        self.go = threading.Event()  # while it is cleared, requests that are `held` sample nothing
        self.go.set()
        self.held: Callable[[Request], bool] = lambda request: True
        self._say, self._pace, self._model = say, pace, model
        self._guides = guides_of(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.submit(request).completion.result() for request in requests]

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        self.requests.append(request)
        said = self._say(request)
        ids = [*encode(self.tokenizer, said), self.tokenizer.eos_token_id] if isinstance(said, str) else list(said)
        if request.grammar:
            guide = self._guides(request.grammar)
            for id in ids[:-1]:
                guide.take(id)
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
        logprobs, count = self._logprobs(request, sampled), request.top_logprobs
        top = tuple(((id, float(p)),) for id, p in zip(sampled, logprobs, strict=True)) if count else ()
        return Completion(np.asarray(sampled, np.int32), logprobs, reason, self.version, top)

    def _logprobs(self, request: Request, sampled: list[int]) -> Any:
        if self._model is None or not sampled:
            return -np.arange(1, len(sampled) + 1) / 8
        import torch

        row = torch.tensor([[*request.prompt.tolist(), *sampled]])
        with torch.no_grad():
            logits = self._model(row).logits[0, len(request.prompt) - 1 : -1].float()
        logprobs = (logits / request.sampling.temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].double().numpy()

    def close(self) -> None: ...


def in_turn(sayings: Sequence[Saying]) -> Say:
    """The first saying for an episode's first request, and so on; the last one for all that follow."""
    heard: Counter[str] = Counter()

    def say(request: Request) -> Saying:
        heard[request.episode] += 1
        return sayings[min(heard[request.episode], len(sayings)) - 1]

    return say


def by_prompt(tokenizer: Any, rules: Sequence[tuple[str, Saying]]) -> Say:
    """The saying of the first rule whose regular expression is found in the text of the prompt."""

    def say(request: Request) -> Saying:
        text = tokenizer.decode(request.prompt.tolist())
        for pattern, saying in rules:
            if re.search(pattern, text, re.DOTALL):
                return saying
        raise ValueError("the script has no rule for this prompt")

    return say


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def letters(tokenizer: Any, text: str) -> list[int]:
    """The text letter by letter: sampled ids that encoding the text again does not give."""
    return [id for letter in text for id in encode(tokenizer, letter)]


@contextmanager
def serving(
    engine: Any, store: Path, protocol: type[http.Protocol] = http.Protocol, model: str = "tiny", **settings: Any
) -> Iterator[str]:
    """The address of a gateway in this process."""
    app = create_app(engine, store, model=model, **{"store_delay": 0.05} | settings)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="A real gateway in front of an engine that says what a script says.")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--script", required=True, type=Path)
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", help="a folder with weights, for the log-probabilities")
    parser.add_argument("--name", default="tiny", help="the model's name for clients")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval() if options.model else None
    script = json.loads(options.script.read_text())
    rules = bool(script) and all(isinstance(s, list) and s and isinstance(s[0], str) for s in script)
    engine = Scripted(by_prompt(tokenizer, script) if rules else in_turn(script), tokenizer, model=model)
    app = create_app(engine, options.store, model=options.name, store_delay=0.05)
    with socket.create_server(("127.0.0.1", options.port)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        http.server(app).run(sockets=[listener])


if __name__ == "__main__":
    main()
