"""A running call: the client may disconnect at any time, and the engine samples in another thread."""

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
from memopd.gateway.openai_api import Answer, GenerationRequest


class RunningCall:
    """A call from the request to the journal. Its task records the call even if the client disconnects."""

    def __init__(self, episode: str, number: int, request: GenerationRequest) -> None:
        self.episode, self.number, self.request = episode, number, request
        self.sampling = request.sampling
        self.started = time.time()
        self.prompt: list[int] = []
        self.history = History()
        self.tokens: list[int] = []  # the tokens sampled so far, if the client asked for a stream
        self.progress = asyncio.Event()  # set when a token was sampled or the call ended
        self.cancelled = False
        self.failure = ""  # the engine's error
        self._loop = asyncio.get_running_loop()
        self._submitted = False
        self._ticket: protocol.Ticket | None = None
        self.task: asyncio.Task[Completion]

    @property
    def name(self) -> str:
        return f"episode {self.episode}: call {self.number}"

    def start(self, run: Coroutine[Any, Any, Completion]) -> None:
        self.task = asyncio.create_task(run)
        self.task.add_done_callback(self._on_end)

    async def submit(self, engine: LiveEngine) -> Completion:
        self._submitted = True  # from here on a disconnect must wait for the ticket, which alone stops the engine
        seed = secrets.randbits(63) if self.request.seed is None else self.request.seed
        request = protocol.Request(
            np.asarray(self.prompt, np.int32), seed, self.sampling, self.request.stop, self.episode
        )
        on_token = self._on_token if self.request.stream else None
        # In a thread: the engine prepares the stop strings, and the other sessions must not wait for that.
        self._ticket = await asyncio.to_thread(engine.submit, request, on_token)
        if self.cancelled:
            self._ticket.cancel()
        return await asyncio.wrap_future(self._ticket.completion)

    def cancel(self) -> None:
        """Stop working, because the client disconnected. Does nothing once the call has ended."""
        if self.task.done():
            return
        self.cancelled = True
        if self._ticket:
            self._ticket.cancel()
        elif not self._submitted:
            self.task.cancel()  # so a waiting prompt is never encoded, and one that is being encoded is dropped

    def answer(self) -> Answer:
        return self.request.answer(f"{self.episode}-{self.number}", self.prompt)

    async def first_token(self) -> None:
        """Wait until the first token was sampled, or the call ended without one."""
        await self.progress.wait()

    def _on_token(self, id: int) -> None:  # runs in the engine's thread
        self.tokens.append(id)
        if not self.progress.is_set():
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self.progress.set)

    def _on_end(self, task: asyncio.Task[Completion]) -> None:
        if not task.cancelled():
            task.exception()  # after a disconnect nothing awaits the task, and asyncio would log its exception
        self.progress.set()


class EventStream(StreamingResponse):
    """The server-sent events of a call. If the stream ends early for any reason, the call is cancelled."""

    def __init__(self, call: RunningCall, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> bool:
    """Run `work` and return True, or return False as soon as the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnected())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return done
