"""A client for any retrieval service that uses Search-R1's protocol."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from memopd.retrieval.corpus import Passage
from memopd.retrieval.index import Hit, check_k, readable

TOKEN = "MEMOPD_RETRIEVAL_TOKEN"  # the environment variable with the secret of a service, for its clients too
_AT_ONCE = 256  # queries per request
_WAITS = (0.5, 2.0)  # seconds to wait before each further attempt
_TIMEOUT = httpx.Timeout(120.0, connect=5.0)  # an embedding model on a CPU is slow on 256 queries

logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs a line for every request


class RemoteIndex:
    """An index behind a URL, with or without /retrieve at its end. Several threads may search at once."""

    def __init__(self, url: str, timeout: httpx.Timeout = _TIMEOUT) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        token = os.environ.get(TOKEN)
        self._client = httpx.Client(timeout=timeout, headers={"authorization": f"Bearer {token}"} if token else {})

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        bounds = [*range(0, len(queries), _AT_ONCE), len(queries)]
        return [hits for a, b in pairwise(bounds) for hits in self._search([readable(q) for q in queries[a:b]], k)]

    def _search(self, queries: list[str], k: int) -> list[list[Hit]]:
        response = self._send({"queries": queries, "topk": k, "return_scores": True})
        if response.is_error:
            raise ValueError(f"{self.url}: status {response.status_code}: {response.text[:300]}")
        try:
            answers = response.json()["result"]
            found = [[_hit(item) for item in items][:k] for items in answers]
        except (ValueError, KeyError, TypeError, AttributeError) as why:
            raise ValueError(f"{self.url}: not an answer in Search-R1's protocol ({why!r})") from None
        if len(found) != len(queries):
            raise ValueError(f"{self.url}: {len(found)} answers to {len(queries)} queries")
        return found

    def _send(self, request: dict[str, Any]) -> httpx.Response:
        """Send a request, and repeat it after temporary errors: the service is starting, overloaded or disconnected."""
        for wait in (*_WAITS, None):
            try:
                response = self._client.post(self.url, json=request)
                if wait is None or response.status_code not in (429, 500, 502, 503, 504):
                    return response
            except httpx.InvalidURL as why:
                raise ValueError(f"{self.url}: {why}") from None
            except httpx.TransportError as why:
                if wait is None:
                    tries = f"no answer in {len(_WAITS) + 1} tries"
                    reason = str(why) or type(why).__name__
                    raise ConnectionError(f"{self.url}: {tries} ({reason}); is it running?") from None
            time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def _hit(item: dict[str, Any]) -> Hit:
    document = item["document"]
    # Search-R1's BM25 service sends no id.
    return Hit(Passage.of(str(document.get("id", "")), document["contents"]), float(item["score"]))
