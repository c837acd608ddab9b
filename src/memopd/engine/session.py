"""Sessions: requests that one caller keeps adding, and completions as they end.

    with open_session(engine) as session:
        session.submit(requests)
        while ended := session.wait():              # [(request, completion), ...], those that ended together
            session.submit(next_requests(ended))    # the others still sample

An engine that samples continuously has a method `session()`; all other engines sample one batch after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from queue import Empty, SimpleQueue
from typing import Any, Self

from memopd.engine.protocol import Completion, Engine, Request, Ticket


class Session(ABC):
    """The requests of one caller, who uses it from one thread."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests. A request is known by its identity, so submit each object once."""

    @abstractmethod
    def wait(self) -> list[tuple[Request, Completion]]:
        """Wait until requests end, and return those that ended together; none if no request is open."""

    def pause(self) -> None:  # noqa: B027 (an engine without a model of this process has nothing to do)
        """Stop using the model until the next `wait`. Call this before others may use it."""

    @abstractmethod
    def close(self) -> None:
        """Cancel the open requests, and return when the engine no longer works on them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def open_session(engine: Engine) -> Session:
    """The engine's own kind of session, or batches if it has none."""
    own: Callable[[], Session] | None = getattr(engine, "session", None)
    return Batches(engine) if own is None else own()


class Batches(Session):
    """For engines that only have `generate`: a batch is what was submitted since the last one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._next += requests

    def wait(self) -> list[tuple[Request, Completion]]:
        batch, self._next = self._next, []
        return list(zip(batch, self._engine.generate(batch), strict=True)) if batch else []

    def close(self) -> None:
        self._next = []


class Tickets(Session):
    """For servers: completions come in the order in which the servers finish them, by the clock."""

    def __init__(self, submit: Callable[[Request], Ticket]) -> None:
        self._submit = submit
        self._open: dict[Request, Ticket] = {}
        self._ended: SimpleQueue[Request] = SimpleQueue()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            ticket = self._open[request] = self._submit(request)
            ticket.completion.add_done_callback(lambda _, ended=request: self._ended.put(ended))  # type: ignore[misc]

    def wait(self) -> list[tuple[Request, Completion]]:
        if not self._open:
            return []
        ended = [self._ended.get()]
        try:
            while True:  # those that ended while the caller was busy
                ended.append(self._ended.get_nowait())
        except Empty:
            done = [(request, self._open.pop(request)) for request in ended]  # all, before one of them raises its error
        return [(request, ticket.completion.result()) for request, ticket in done]

    def close(self) -> None:
        for ticket in self._open.values():
            ticket.cancel()
        wait([ticket.completion for ticket in self._open.values()])
        self._open = {}
