"""Batches the requests that arrive while a search runs, so that no request waits for a batch to fill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memopd.retrieval.index import Hit, Index


@dataclass(frozen=True, slots=True)
class _Waiting:
    queries: Sequence[str]
    k: int
    answer: asyncio.Future[list[list[Hit]]]


class Batcher:
    """Must be used from one event loop; the index searches in another thread."""

    def __init__(self, index: Index, most: int) -> None:
        self._index = index
        self._most = most  # queries searched at once, unless a single request has more
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None  # kept, because the event loop has only weak references to tasks

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        answer: asyncio.Future[list[list[Hit]]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(queries, k, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch = self._next()
            queries = [query for one in batch for query in one.queries]
            try:
                # Answers are ordered, so the k best passages are the first k of any longer answer.
                found = iter(await asyncio.to_thread(self._index.search, queries, max(one.k for one in batch)))
            except Exception as error:
                for one in batch:
                    _settle(one.answer, error)
                continue
            for one in batch:
                _settle(one.answer, [next(found)[: one.k] for _ in one.queries])

    def _next(self) -> list[_Waiting]:
        """Remove the requests that have waited longest, as many as the limit allows."""
        batch: list[_Waiting] = []
        room = self._most
        while self._waiting and (not batch or len(self._waiting[0].queries) <= room):
            batch.append(self._waiting.pop(0))
            room -= len(batch[-1].queries)
        return batch


def _settle(answer: asyncio.Future[list[list[Hit]]], outcome: list[list[Hit]] | Exception) -> None:
    if answer.done():  # the client has disconnected
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
