"""What every server of ours refuses: pages of other sites, strangers without the token, and clients that never finish.

A server on your own machine is within reach of every web page that your browser shows. A page may send requests to
any address without reading the answers, and it may let its own name resolve to 127.0.0.1 and then read them too. So
`Guard` checks, before the application sees a request, the `Host` it was sent to, the `Origin` it came from, the bearer
token and the type of the body. It allows no cross-origin request: nothing here answers a preflight with permission.

`Protocol` limits how long a request may take to arrive and how many connections are open.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HEADER_SECONDS = 20.0  # from the connection, or the first byte of a later request, to the end of its headers
REQUEST_SECONDS = 30.0  # and to the end of its body
IDLE_SECONDS = 60  # between two requests; longer than clients wait, so that none sends into a connection that we close
MAX_CONNECTIONS = 800  # below the usual limit of 1,024 open files


# ---- who may ask ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused. `message` quotes nothing from the request, so that it may be logged."""

    status: int
    code: str
    message: str


class Guard:
    """ASGI middleware. `answer` makes the JSON body of a refusal, and may log it.

    `host` is the address that the server listens on. With a wildcard address (0.0.0.0, ::), which needs a token, the
    server has names that it cannot know, so any `Host` is accepted: a page would still need the token.
    """

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, answer: Callable[[Scope, Refusal], Any]) -> None:
        self._app, self._token, self._answer = app, token, answer
        self._host = None if _is_wildcard(host) else host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)):
            await JSONResponse(self._answer(scope, refusal), refusal.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._host is not None and _name(host) != self._host and not is_loopback(_name(host)):
            return Refusal(
                421, "wrong_host", "this server has another name: use 127.0.0.1, or start it with that name as --host"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            return Refusal(403, "foreign_origin", "pages of other sites may not use this server")
        if self._token is not None and scope["path"] != "/health":
            token = self._token.encode()
            bearer = hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token)
            if not bearer and not hmac.compare_digest(headers.get(b"x-api-key", b""), token):  # Anthropic's clients
                return Refusal(401, "invalid_api_key", "wrong or missing bearer token")
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                return Refusal(415, "not_json", "send the body as application/json (the header content-type)")
        return None


def token_of(variable: str, host: str) -> str | None:
    """The token in an environment variable. It must be there if other machines can reach `host`."""
    token = os.environ.get(variable) or None
    check_listener(host, token, variable)
    return token


def check_listener(host: str, token: str | None, variable: str) -> None:
    if token is None and not is_loopback(host):
        raise ValueError(f"set {variable} to a secret, or use --host 127.0.0.1: other machines can reach {host}")


def is_loopback(host: str) -> bool:
    """
    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "localhost.example")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return host == "" or ip_address(host).is_unspecified
    except ValueError:
        return False


def _name(host: str) -> str:
    """The name in a `Host` header, without the port.

    >>> _name("[::1]:8000"), _name("localhost:8000"), _name("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


# ---- how long a client may take -------------------------------------------------------------------------------------


class Protocol(H11Protocol):
    """Closes connections whose request does not arrive in time. It never closes one that is being answered.

    Beyond MAX_CONNECTIONS, a new connection takes the place of the one that has waited longest for its client: one
    with half a request, or else an idle one. Only if every connection is being answered, the new one is closed.
    """

    header_seconds, request_seconds, most = HEADER_SECONDS, REQUEST_SECONDS, MAX_CONNECTIONS

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # when the server began to wait for this client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect(self.header_seconds)
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._since = self.loop.time()  # a request begins
        before = self.conn.their_state
        super().data_received(data)
        now = self.conn.their_state
        if now is h11.IDLE:  # its headers are not complete
            if self._deadline is None or before is h11.SEND_BODY:  # the latter: it was answered before its body's end
                self._expect(self.header_seconds)
        elif now is not h11.SEND_BODY:
            self._expect(None)  # it is complete
        elif before is not h11.SEND_BODY:
            self._expect(self.request_seconds - (self.loop.time() - self._since))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY and self._deadline is None:  # the next request came with this one
            self._expect(self.request_seconds)

    def _expect(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, unless this is called again."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, Protocol) and c is not self and c.is_waiting]
        oldest = min(others, key=lambda c: (c._deadline is None, c._since), default=self)
        oldest.connections.discard(oldest)
        oldest.transport.abort()

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for this client: for the rest of a request, or for the next one."""
        return self._deadline is not None or self.cycle is None or self.cycle.response_complete


def server(app: ASGIApp, protocol: type[Protocol] = Protocol, **settings: Any) -> uvicorn.Server:
    """A uvicorn server with the limits above. It logs errors only; the applications log the requests they refuse."""
    defaults: dict[str, Any] = {
        "log_config": None, "log_level": "error", "access_log": False, "timeout_keep_alive": IDLE_SECONDS,
    }  # fmt: skip
    return uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", **defaults | settings))


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and its URL; port 0 is a free one. It is opened before a server says that it runs."""
    ipv6 = ":" in host
    try:
        opened = socket.create_server((host, port), family=socket.AF_INET6 if ipv6 else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use: choose another with --port") from None
        raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    with opened:
        yield opened, f"http://{f'[{host}]' if ipv6 else host}:{opened.getsockname()[1]}"
