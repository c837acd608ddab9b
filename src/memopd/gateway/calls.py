"""A running call: the client may disconnect at any time, and the engine samples in another thread."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from memopd.engine import protocol
from memopd.engine.protocol import Completion, LiveEngine
from memopd.gateway.ask import Ask
from memopd.gateway.drift import History

CONSTRAINED = "training cannot use it: a grammar restricted its tokens (response_format, or a required tool)"


@dataclass(frozen=True, slots=True)
class Label:
    """Which episode a call belongs to, and what its client says about it."""

    episode: str
    purpose: str = ""
    trainable: bool = True


class RunningCall:
    """A call from the request to the journal. Its task records the call even if the client disconnects."""

    def __init__(self, label: Label, number: int, ask: Ask) -> None:
        self.label, self.number, self.ask = label, number, ask
        self.episode = label.episode
        self.sampling = ask.sampling  # its token limit may be cut
        self.cut: int | None = None  # the token limit that the client asked for, if it was
        self.grammar = ""
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

    @property
    def trainable(self) -> bool:
        return self.label.trainable and not self.ask.is_constrained

    @property
    def training_note(self) -> str:
        """What training will say about the call; empty if nothing, or if its client says that it does not train."""
        if not self.label.trainable:
            return ""
        return CONSTRAINED if self.ask.is_constrained else self.sampling.training_note

    def start(self, run: Coroutine[Any, Any, Completion]) -> None:
        self.task = asyncio.create_task(run)
        self.task.add_done_callback(self._on_end)

    async def submit(self, engine: LiveEngine) -> Completion:
        self._submitted = True  # from here on a disconnect must wait for the ticket, which alone stops the engine
        seed = secrets.randbits(63) if self.ask.seed is None else self.ask.seed
        request = protocol.Request(
            np.asarray(self.prompt, np.int32),
            seed,
            self.sampling,
            self.ask.stop,
            self.episode,
            self.label.purpose,
            self.grammar,
            self.ask.top_logprobs,
        )
        on_token = self._on_token if self.ask.stream else None
        # In a thread: the engine prepares stop strings and grammars, and the other sessions must not wait for that.
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
