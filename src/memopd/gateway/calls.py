"""One call of the gateway on its way, between a connection that may close and an engine that samples in a thread."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from memopd.engine import protocol
from memopd.engine.protocol import Completion, LiveEngine
from memopd.gateway.drift import History
from memopd.gateway.openai_api import Asked


class Flight:
    """One call on its way. Its task runs to the journal whatever becomes of the connection."""

    def __init__(self, episode: str, number: int, asked: Asked) -> None:
        self.episode, self.number, self.asked = episode, number, asked
        self.started = time.time()
        self.prompt: list[int] = []
        self.history = History()
        self.heard: list[int] = []  # of a stream, as they come
        self.news = asyncio.Event()  # something was heard, or the call ended
        self.hung_up = False
        self.trouble = ""  # of the engine
        self._loop = asyncio.get_running_loop()
        self._ticket: protocol.Ticket | None = None
        self.task: asyncio.Task[Completion]

    @property
    def name(self) -> str:
        return f"episode {self.episode}: call {self.number}"

    def begin(self, run: Coroutine[Any, Any, Completion]) -> None:
        self.task = asyncio.create_task(run)
        self.task.add_done_callback(self._ended)

    def submit(self, engine: LiveEngine) -> asyncio.Future[Completion]:
        seed = secrets.randbits(63) if self.asked.seed is None else self.asked.seed
        request = protocol.Request(
            np.asarray(self.prompt, np.int32), seed, self.asked.sampling, self.asked.stop, self.episode
        )
        self._ticket = engine.submit(request, self._hear if self.asked.stream else None)
        if self.hung_up:
            self._ticket.cancel()
        return asyncio.wrap_future(self._ticket.completion)

    def hang_up(self) -> None:
        """The client is gone: sample no further. Does nothing once the call has ended."""
        if not self.task.done():
            self.hung_up = True
            if self._ticket:
                self._ticket.cancel()

    async def something(self) -> None:
        """Until the first id is heard, or the call ends without one."""
        await self.news.wait()

    def _hear(self, id: int) -> None:  # in the engine's thread
        self.heard.append(id)
        if not self.news.is_set():
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.news.set)

    def _ended(self, task: asyncio.Task[Completion]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waits for the task raises it; after a hang-up nobody does
        self.news.set()


class Events(StreamingResponse):
    """A stream that hangs up on the engine when it ends early, whoever ended it."""

    def __init__(self, flight: Flight, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        self._flight = flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._flight.hang_up()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> bool:
    """Whether the work was done before the client hung up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return done
