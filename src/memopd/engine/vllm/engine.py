"""An engine whose model runs in one or several vLLM servers.

    engine = VllmEngine(["http://127.0.0.1:8001"], tokenizer, weights=checkpoint, version=7)
    engine.verify(score, prompts, tolerance=1e-4)   # required after every update, before you can sample
    completions = engine.generate(requests)
    engine.update(model.state_dict(), version=8)

One thread runs an event loop that talks to the servers. You may call every public method from any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memopd.engine.protocol import Completion, Request, Ticket
from memopd.engine.session import Tickets
from memopd.engine.vllm import weights as weight_updates
from memopd.engine.vllm.probe import probe, probe_at_start, read_label
from memopd.engine.vllm.servers import Fleet, Lost, Server, adapter_of
from memopd.engine.vllm.weights import Score, StaleWeights, Weights, rounding_tolerance
from memopd.engine.vllm.wire import BadAnswer, Received, body, check_end
from memopd.types import Floats, Ids, Sampling, StopReason

__all__ = ["Score", "StaleWeights", "VllmEngine", "Weights", "rounding_tolerance"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_TRIES = 5  # per request; the server is probed after each failure, so this is no busy loop


class VllmEngine:
    """`weights`: the checkpoint that the servers must hold, of `version`; None: the weights that they hold now.

    `adapter`: an adapter folder that the servers load on top of their weights before the first request. Unlike weights
    and adapters that you give to `update`, it needs no `verify`: take this if you do not have the model yourself.
    `folder`: where the engine writes weights that you pass as tensors; the servers must see it under the same path.
    After an update from this folder, it removes from it what MemOPD wrote for servers before, and nothing else.
    With a folder and no weights, the engine samples nothing before an update, so the servers may hold any weights.
    `timeout`: seconds without an answer after which a server counts as hung. `patience`: seconds to wait for a server
    while all are down.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        *,
        weights: Weights | None = None,
        version: int = 0,
        adapter: Path | None = None,
        folder: Path | None = None,
        timeout: float = 600.0,
        patience: float = 300.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.version = version
        self._folder = folder and folder.expanduser().resolve()
        self._holds: Path | Callable[[str], None] | None = None  # the weights of every server; None: as they are
        self._label = ""  # of these weights
        self._verified = True
        self._key: tuple[list[Request], list[Completion]] = ([], [])  # answers that the trainer has verified
        self._tolerance = 0.0
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._closed, self._gate = False, threading.Lock()  # so that no request starts in a loop that has ended
        self._submitting = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm engine", daemon=True)
        self._thread.start()
        try:
            self._fleet = self._run(self._connect(urls, timeout, patience))
            if weights is not None:
                self.update(weights, version)
            elif adapter is not None:
                self.update(adapter, version)
                self._verified = True
                self._loop.call_soon_threadsafe(self._fleet.resume)
            elif folder is not None:
                self._verified = False
            else:
                self.version = self._common_version()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End open requests as aborted, and disconnect."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Sampling

    @property
    def max_length(self) -> int | None:
        """The most tokens of prompt and completion together, as the servers report it."""
        return min((s.max_length for s in self._fleet.servers if s.max_length), default=None)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        tickets = [self._submit(request, None, stream=False) for request in requests]
        try:
            return [ticket.completion.result() for ticket in tickets]
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise

    def session(self) -> Tickets:
        """For a caller whose next requests depend on completions, such as an agent."""
        return Tickets(lambda request: self._submit(request, None, stream=False))

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        return self._submit(request, on_token, stream=True)  # a stream, so that a cancelled request keeps its tokens

    def _submit(self, request: Request, on_token: Callable[[int], None] | None, stream: bool) -> Ticket:
        with self._submitting:  # waits while another thread is in `updating`
            if not self._verified:
                raise ValueError(f"weights of version {self.version} are not verified: call update, then verify")
        check_end(request, self.tokenizer)  # here, so that a bad request raises in the caller's thread
        payload = body(request, stream)
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # from here on only `cancel` ends it
        delivered = Received()
        tasks: list[asyncio.Task[Completion]] = []

        def finished(task: asyncio.Task[Completion]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                future.set_result(self._aborted(delivered))
            elif error := task.exception():
                future.set_exception(error)
            else:
                future.set_result(task.result())

        def start() -> None:
            task = self._loop.create_task(self._complete(payload, delivered, on_token))
            self._tasks.add(task)
            tasks.append(task)
            task.add_done_callback(finished)

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed, so the request was aborted already
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())

        with self._gate:
            self._check_open()
            self._loop.call_soon_threadsafe(start)
        return Ticket(future, cancel)

    async def _complete(
        self, payload: dict[str, Any], delivered: Received, on_token: Callable[[int], None] | None = None
    ) -> Completion:
        """One request, sent to another server after each failure. `delivered` is what `on_token` got so far."""
        trouble: Exception | None = None
        for _ in range(_TRIES):
            server = await self._fleet.acquire()
            try:
                return self._completion(server, await self._ask(server, payload, delivered, on_token))
            except _Diverged:
                return self._aborted(delivered)
            except Lost as error:
                self._fleet.lost(server, error)
                trouble = error
            finally:
                self._fleet.release(server)
        raise ConnectionError(f"a request failed {_TRIES} times, last at {server.url}: {trouble}") from trouble

    async def _ask(
        self, server: Server, payload: dict[str, Any], delivered: Received, on_token: Callable[[int], None] | None
    ) -> Received:
        received, adapter = Received(), adapter_of(server.label)
        if adapter:
            payload = {**payload, "model": adapter}
        try:
            async for choice in self._fleet.choices(server, payload):
                new = received.take(choice)
                if payload["stream"]:
                    _deliver(received, new, delivered, on_token)
        except BadAnswer as error:
            raise Lost(str(error)) from error
        if received.stop is None:
            raise Lost("the answer broke off")
        if adapter_of(received.label) != adapter:
            raise Lost(f"its weights became {received.label!r}, and it was asked to sample with {server.label!r}")
        return received

    def _completion(self, server: Server, received: Received) -> Completion:
        assert received.stop is not None
        if self._holds is not None:
            if received.label != self._label:
                raise Lost(f"it sampled with weights {received.label!r} instead of {self._label!r}: was it restarted?")
        elif received.label is not None:
            self.version = weight_updates.version_of(received.label)  # somebody else updates these servers
        tokens, logprobs = received.arrays()
        return Completion(tokens, logprobs, received.stop, self.version, tuple(received.top))

    def _aborted(self, delivered: Received) -> Completion:
        tokens, logprobs = delivered.arrays()
        return Completion(tokens, logprobs, StopReason.ABORTED, self.version)

    # Weights

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update and verify in this block if other threads sample meanwhile. It begins when open requests have ended,
        with the weights they began with; new requests of other threads wait for its end."""
        with self._submitting:
            self._check_open()
            try:
                self._run(self._fleet.pause())
                yield
            finally:  # after an error too, if the servers still have weights that were verified
                if self._verified and not self._closed:
                    self._loop.call_soon_threadsafe(self._fleet.resume)

    def update(self, weights: Weights, version: int) -> None:
        """Give new weights to every server: a checkpoint folder that the servers see under the same path, tensors with
        the names of a checkpoint, or a function that sends weights to the server at a URL (vLLM's weight transfer). An
        adapter folder in PEFT's format goes on top of the weights that the server was started with.

        Open requests finish first, with the weights they began with. Waiting ones start after `verify`.
        """
        self._check_open()
        if isinstance(weights, Mapping):
            if self._folder is None:
                raise ValueError("give VllmEngine a folder that the servers can read, to write updated weights to")
            weights = weight_updates.write(weights, self._folder, version)
        elif isinstance(weights, Path):
            weights = weight_updates.checkpoint(weights)
        self._run(self._update(weights, version))
        if isinstance(weights, Path) and weights.parent == self._folder:
            weight_updates.remove_older(weights)

    def verify(
        self,
        score: Score,
        prompts: Sequence[Ids],
        *,
        tolerance: float,
        sampling: Sampling = Sampling(max_tokens=16),  # noqa: B008 (frozen)
    ) -> dict[str, float]:
        """Every server samples from the prompts, and the trainer scores the results. Returns the largest difference
        per server.

        `score(pairs, temperature)` gives the trainer's log-probabilities of the completions of (prompt, completion)
        pairs. `StaleWeights` names the first server whose difference exceeds `tolerance` (see `rounding_tolerance`).
        """
        self._check_open()
        requests = [Request(np.asarray(p), seed=i, sampling=sampling) for i, p in enumerate(prompts)]
        answers = self._run(self._ask_all(requests))
        gaps = self._gaps(score, requests, answers)
        for url, gap in gaps.items():
            if not gap <= tolerance:
                stale = StaleWeights(url, self.version, gap, tolerance, bool(adapter_of(self._label)))
                self._loop.call_soon_threadsafe(self._fleet.fail, stale)
                raise stale
            log.info("%s: version %d, log-probabilities within %.2g of the trainer's", url, self.version, gap)
        self._key = (requests, next(iter(answers.values())))
        self._tolerance = 2 * tolerance  # between two servers, which may each differ from the trainer by `tolerance`
        self._verified = True
        self._loop.call_soon_threadsafe(self._fleet.resume)
        return gaps

    def _gaps(
        self, score: Score, requests: Sequence[Request], answers: Mapping[str, Sequence[Completion]]
    ) -> dict[str, float]:
        if not requests:
            raise ValueError("give at least one prompt to verify with")
        pairs = [(r.prompt, c.tokens) for sampled in answers.values() for r, c in zip(requests, sampled, strict=True)]
        ours: list[Floats] = list(score(pairs, requests[0].sampling.temperature))
        if len(ours) != len(pairs):
            raise ValueError(f"score: {len(ours)} results for {len(pairs)} pairs")
        n = len(requests)
        return {url: weight_updates.gap(ours[i * n : (i + 1) * n], c) for i, (url, c) in enumerate(answers.items())}

    async def _update(self, weights: Path | Callable[[str], None], version: int) -> None:
        self._verified = False
        await self._fleet.pause()
        self._holds, self.version, self._key = weights, version, ([], [])
        self._label = weight_updates.label_of(weights, version)
        up = [s for s in self._fleet.servers if s.down_since is None]  # the others get the weights when they are back
        loads = [weight_updates.load(self._fleet, server, weights, self._label) for server in up]
        if isinstance(weights, Path):
            results = await asyncio.gather(*loads, return_exceptions=True)
        else:  # one after the other, because the function is the only sender
            results = [r for load in loads for r in await asyncio.gather(load, return_exceptions=True)]
        self._sort_out(up, results)

    async def _ask_all(self, requests: Sequence[Request]) -> dict[str, list[Completion]]:
        """The answers of every server that is up. Servers that go down meanwhile are left out, unless all do."""
        while True:
            one = await self._fleet.acquire(even_if_paused=True)  # waits for a server, or fails
            self._fleet.release(one)
            up = [s for s in self._fleet.servers if s.down_since is None]
            results = await asyncio.gather(*(self._answers(s, requests) for s in up), return_exceptions=True)
            if answers := self._sort_out(up, results):
                return answers

    def _sort_out(self, servers: Sequence[Server], results: Sequence[_T | BaseException]) -> dict[str, _T]:
        """Results by URL. Marks servers that were lost as down, and raises any other error."""
        good: dict[str, _T] = {}
        errors: list[BaseException] = []
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, Lost):
                self._fleet.lost(server, result)
            elif isinstance(result, BaseException):
                errors.append(result)
            else:
                good[server.url] = result
        if errors:
            raise errors[0]
        return good

    async def _answers(self, server: Server, requests: Sequence[Request]) -> list[Completion]:
        if self._holds is None:  # somebody else updates these servers, so the label may have changed
            server.label = await read_label(self._fleet, server)
        asked = (self._ask(server, body(r, stream=False), Received(), None) for r in requests)
        return [self._completion(server, received) for received in await asyncio.gather(*asked)]

    # Connecting and reconnecting

    async def _connect(self, urls: Sequence[str], timeout: float, patience: float) -> Fleet:
        fleet = Fleet(urls, timeout, patience, self._admit)
        try:
            for server in fleet.servers:
                await probe_at_start(fleet, server, self.tokenizer)
        except BaseException:
            await fleet.close()
            raise
        return fleet

    async def _disconnect(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "_fleet"):
            await self._fleet.close()

    async def _admit(self, server: Server) -> None:
        """Check a server that was down: its model, flags, weights and answers."""
        try:
            await probe(self._fleet, server, self.tokenizer)
            # An adapter may be gone although the label is there, as when somebody unloaded it.
            if self._holds is not None and (server.label != self._label or adapter_of(self._label)):
                if not isinstance(self._holds, Path):
                    raise Lost(f"it came back with weights {server.label!r}, and {self._label!r} cannot be sent again")
                await weight_updates.load(self._fleet, server, self._holds, self._label)
        except ValueError as error:  # somebody restarted it wrongly, and may correct that: the others continue
            raise Lost(str(error)) from error
        requests, key = self._key
        if key:
            gap = weight_updates.replay_gap(key, await self._answers(server, requests))
            if not gap <= self._tolerance and key is self._key[1]:  # unless an update came in between
                raise StaleWeights(server.url, self.version, gap, self._tolerance, bool(adapter_of(self._label)))

    def _common_version(self) -> int:
        labels = {server.url: server.label for server in self._fleet.servers}
        if len(set(labels.values())) > 1:
            listed = ", ".join(f"{url}: {label!r}" for url, label in labels.items())
            raise ValueError(f"the servers hold different weights ({listed}): give the weights that they should hold")
        return weight_updates.version_of(next(iter(labels.values())))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine is closed: make a new one")

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Diverged(Exception):
    """A completion that was sampled again on another server differs from the tokens that were already delivered."""


def _deliver(received: Received, new: list[int], delivered: Received, on_token: Callable[[int], None] | None) -> None:
    """Passes on the tokens that were not yet delivered."""
    for i, token in enumerate(new, len(received.tokens) - len(new)):
        if i < len(delivered.tokens):
            if token != delivered.tokens[i]:
                raise _Diverged
            continue
        delivered.tokens.append(token)
        delivered.logprobs.append(received.logprobs[i])
        if on_token:
            on_token(token)
