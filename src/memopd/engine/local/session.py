"""A session of the local engine. The engine runs a step only while somebody waits for one of the open requests.

So everything that a caller submits between two calls of `wait` enters in the same step, however long the caller takes,
and each call of `wait` returns the requests that ended in one step. The results are a function of the requests.

On a GPU the engine does not idle while the caller works on what `wait` returned: it runs one step *ahead*. Whoever
submits a request meanwhile waits for the end of that step, so that the request cannot enter it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING

from memopd.engine.local.sequence import SampledSequence
from memopd.engine.protocol import Completion, Request
from memopd.engine.session import Session

if TYPE_CHECKING:
    from memopd.engine.local.engine import LocalEngine


class LocalSession(Session):
    """Shares the engine's lock; the engine changes `waits`, `ahead` and `ended`."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._open: dict[SampledSequence, None] = {}
        self.waits = False  # the caller waits, and none of its requests has ended since
        self.ahead = False  # the engine runs a step while the caller works; it ends before anything else happens
        self.ended: list[SampledSequence] = []  # delivered, for the next `wait`

    def submit(self, requests: Sequence[Request]) -> None:
        sequences = [self._engine._read(request) for request in requests]  # raises before any request enters
        for sequence in sequences:
            sequence.session = self
        self._engine._enter(sequences)
        self._open |= dict.fromkeys(sequences)

    def wait(self) -> list[tuple[Request, Completion]]:
        """The requests that ended in one step, in the order in which they were submitted."""
        if not self._open:
            return []
        engine = self._engine
        if not self.ended:
            engine._check_can_wait()
        with engine._lock:
            engine._lock.wait_for(lambda: not self.ahead)
            self.waits = not self.ended
            engine._sessions.add(self)
            engine._start()
            engine._lock.wait_for(lambda: self.ended)
            self.waits = False
            ended, self.ended = set(self.ended), []
            done = [sequence for sequence in self._open if sequence in ended]
            for sequence in done:
                del self._open[sequence]
            if engine.runs_ahead and self._open:
                self.ahead = True
                engine._start()
        return [(sequence.request, sequence.future.result()) for sequence in done]

    def pause(self) -> None:
        engine = self._engine
        with engine._lock:
            if engine._thread is not threading.current_thread():
                engine._lock.wait_for(lambda: not self.ahead)
            engine._sessions.discard(self)
            engine._lock.notify_all()
            if engine._thread is not threading.current_thread():  # unless others need it, the model is released
                engine._lock.wait_for(lambda: engine._thread is None or engine._sessions or engine._is_awaited())

    def close(self) -> None:
        with self._engine._lock:
            for sequence in self._open:
                sequence.session = None  # it ends although nobody calls `wait`
                self._engine._cancel(sequence)
        self.pause()
        if self._engine._thread is not threading.current_thread():  # where garbage collection may run this
            wait([sequence.future for sequence in self._open])
        self._open = {}
