"""The servers of an engine. The least busy server that is up gets the next request; one that failed is checked first.

Everything here runs in the engine's event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from memopd.engine.vllm.wire import GENERATE, BadAnswer, Refused, choice_of, failure, reason

log = logging.getLogger(__name__)

AT_ONCE = 256  # open requests per server; more would only wait in its queue, with a socket each
_LONGEST_PAUSE = 5.0  # seconds between two checks of a server that is down
_ADAPTER = "@adapter:"  # in the labels of adapters


class Lost(Exception):
    """A server died, hung or failed: its request must be sent again, to it or to another server."""


def adapter_label(version: int, folder: object) -> str:
    """The label of an adapter, which is also its name at the server.

    vLLM keys its prefix cache by name and path, so every version has a name of its own. Replacing an adapter under one
    name (`load_inplace`) does not do: vLLM 0.32 then reads the folder again at every step, and dies if it is gone.
    """
    return f"{version}{_ADAPTER}{folder}"


def adapter_of(label: str | None) -> str | None:
    """The name of the adapter that a server with this label samples with; None: its model alone.

    >>> adapter_of("7@adapter:/run/served/adapter-7"), adapter_of("7@/run/served/weights-7")
    ('7@adapter:/run/served/adapter-7', None)
    """
    return label if label and _ADAPTER in label else None


@dataclass(eq=False, slots=True)
class Server:
    url: str
    outstanding: int = 0
    label: str | None = None  # of its weights; None: it does not report one
    max_length: int | None = None  # tokens of prompt and completion together; None: it does not report it
    down_since: float | None = None  # None: up
    trouble: str = ""  # why it is down


class Fleet:
    """Calls `admit` before a server that was down gets requests again; `admit` raises while it must not get any."""

    def __init__(
        self, urls: Sequence[str], timeout: float, patience: float, admit: Callable[[Server], Awaitable[None]]
    ) -> None:
        self.servers = [Server(url) for url in _clean(urls)]
        self.timeout, self.patience = timeout, patience
        self.failure: Exception | None = None
        self._admit = admit
        self._running = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._revivals: set[asyncio.Task[None]] = set()
        key = os.environ.get("VLLM_API_KEY")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10, pool=None),
            # We drop idle connections before the server does (after 5 s), which would look like a dead server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE, keepalive_expiry=2),
        )

    async def close(self) -> None:
        for task in self._revivals:
            task.cancel()
        await self._client.aclose()

    # Which server

    async def acquire(self, even_if_paused: bool = False) -> Server:
        """The least busy server that is up. Waits for one; raises an error if all have been down for too long."""
        while True:
            if self.failure and not even_if_paused:
                raise self.failure
            up = [s for s in self.servers if s.down_since is None]
            free = [s for s in up if s.outstanding < AT_ONCE]
            if free and (self._running or even_if_paused):
                server = min(free, key=lambda s: s.outstanding)
                server.outstanding += 1
                return server
            if not up:
                self._give_up_if_overdue()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake(1)  # this waiter does not use its turn, so the next one gets it
                raise

    def release(self, server: Server) -> None:
        server.outstanding -= 1
        self._wake(1)

    async def pause(self) -> None:
        """No request starts until `resume`. Returns when the open ones have ended."""
        self._running, self.failure = False, None
        while any(s.outstanding for s in self.servers):
            await asyncio.sleep(0.01)

    def resume(self) -> None:
        self._running, self.failure = True, None
        self._wake(len(self._waiting))

    def fail(self, error: Exception) -> None:
        """Raise `error` for every waiting and later request."""
        self.failure = error
        self._wake(len(self._waiting))

    def lost(self, server: Server, why: object) -> None:
        """Mark a server as down until it is admitted again."""
        server.trouble = str(why)
        if server.down_since is None:
            server.down_since = time.monotonic()
            log.warning("%s: down: %s", server.url, why)
            task = asyncio.get_running_loop().create_task(self._revive(server))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: Server) -> None:
        pause = 0.1
        while server.down_since is not None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                await self._admit(server)
            except Lost as error:
                server.trouble = str(error)
            except Exception as error:  # stale weights, or a bug of ours: only an update may help
                self.fail(error)
            else:
                log.warning("%s: up again after %.1f s", server.url, time.monotonic() - server.down_since)
                server.down_since = None
            self._wake(len(self._waiting))  # to use the server, or to notice that the time is over

    def _give_up_if_overdue(self) -> None:
        now = time.monotonic()
        if all(now - (s.down_since or now) > self.patience for s in self.servers):
            troubles = "; ".join(f"{s.url}: {s.trouble}" for s in self.servers)
            raise ConnectionError(f"no policy server came back within {self.patience:g} s: {troubles}")

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    # Requests to a server

    async def call(self, server: Server, method: str, path: str, **rest: Any) -> Any:
        """The JSON that a route returns (None for an empty body). Raises `Lost` if another try may help."""
        with _named(server, path):
            response = await self._client.request(method, server.url + path, **rest)
            _raise_for(response)
            return response.json() if response.content else None

    async def tell(self, server: Server, path: str, **rest: Any) -> None:
        """POST to a route whose answer is only a status."""
        with _named(server, path):
            _raise_for(await self._client.post(server.url + path, **rest))

    async def has(self, server: Server, path: str) -> bool:
        """Whether a POST route exists: the server answers a GET of an existing one with 405, not 404."""
        try:
            return (await self._client.get(server.url + path, timeout=10)).status_code != 404
        except httpx.TransportError as error:
            raise Lost(f"{path}: {_reason(error)}") from error

    async def choices(self, server: Server, payload: dict[str, Any], **rest: Any) -> AsyncIterator[dict[str, Any]]:
        """The choices of a streamed completion, or the single choice of one that is not streamed."""
        with _named(server, GENERATE):
            if not payload["stream"]:
                answer = await self.call(server, "POST", GENERATE, json=payload, **rest)
                if (choice := choice_of(answer)) is not None:
                    yield choice
                return
            async with self._client.stream("POST", server.url + GENERATE, json=payload, **rest) as response:
                if response.status_code != 200:
                    await response.aread()
                    _raise_for(response)
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and (choice := choice_of(json.loads(line[6:]))) is not None:
                        yield choice


@contextmanager
def _named(server: Server, path: str) -> Iterator[None]:
    """Raises errors of the block as `Lost` if another try may help, else as `ValueError`; both name the route."""
    try:
        yield
    except (httpx.TransportError, json.JSONDecodeError, UnicodeDecodeError, BadAnswer) as error:
        raise Lost(f"{path}: {_reason(error)}") from error
    except Refused as error:
        if path == GENERATE and error.status == 404:  # the adapter or the route is gone, as after a restart
            raise Lost(f"{path}: {error}") from error
        raise ValueError(f"{server.url}{path}: {error}") from error


def _raise_for(response: httpx.Response) -> None:
    if response.status_code >= 400:
        try:
            text = reason(response.json())
        except ValueError:  # not JSON, or not UTF-8, as the page of a proxy
            text = response.text
        raise failure(response.status_code, text)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__  # time-outs have no text


def _clean(urls: Sequence[str]) -> list[str]:
    if isinstance(urls, str):
        urls = [urls]
    cleaned = [url.rstrip("/").removesuffix("/v1") for url in urls]
    if not cleaned:
        raise ValueError("no policy server given; one looks like http://127.0.0.1:8001")
    for url in cleaned:
        if not url.startswith(("http://", "https://")) or not _is_address(url):
            raise ValueError(f"{url!r} is not the address of a server; one looks like http://127.0.0.1:8001")
        if cleaned.count(url) > 1:
            raise ValueError(f"{url} is given twice")
    return cleaned


def _is_address(url: str) -> bool:
    """Whether it has a host, and its port is none or a possible one."""
    try:
        parsed = httpx.URL(url)
        return bool(parsed.host) and (parsed.port is None or 0 < parsed.port < 2**16)
    except (httpx.InvalidURL, ValueError):
        return False
