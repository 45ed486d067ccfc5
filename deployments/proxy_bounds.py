"""Bounds on what Serve's HTTP proxy takes from strangers, before any request reaches the ingress.

Serve's proxy is uvicorn over httptools, which keeps headers for as long as they come and waits for them without end;
and Serve obeys headers that are meant for what stands before it. `bounded` is what Ray calls in each proxy where
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. It must not know of the application, its routes or its keys.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn.protocols.http.auto
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

IMPORT_PATH = "deployments.proxy_bounds.bounded"
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"

MAX_HEAD_BYTES = 131_072
"""Of a request's line and headers while they come in pieces; the ingress has a narrower bound on whole ones."""
HEAD_TIMEOUT_S = 30.0
"""From a connection's beginning, or a later request's first byte, to the end of its headers."""
CONNECTIONS_OF_FILES = 0.5
"""The share of the process's file descriptors that connections may take; the rest is for the proxy's own."""

# Serve reads these as instructions, whoever sent them: the replica to prefer, how long to wait, to go on after the
# client has left.
INSTRUCTIONS = frozenset(
    {b"serve-multiplexed-model-id", b"x-session-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}
)
HEADER_FIELDS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
SERVICE_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def bounded() -> list[Middleware]:
    """Makes this process's HTTP servers bounded ones; the list is what Serve wraps around its proxy."""
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedProtocol
    return [Middleware(PlainRequests)]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds on the size and the time of a request's head, and on the number of connections."""

    _waiting: asyncio.TimerHandle | None = None
    _in_head = False
    _in_body = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            self._end(SERVICE_UNAVAILABLE)
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._waiting is None and not self._in_body:
            self._wait_for_head()
        began_before = self._in_head
        super().data_received(data)
        # The piece in which a head begins is not counted: a read has an end of its own.
        self._head_bytes = self._head_bytes + len(data) if began_before and self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._end(HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """No route has a use for one."""
        self.send_400_response("WebSockets are not served here.")

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self._end, REQUEST_TIMEOUT)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end(self, answer: bytes) -> None:
        """Answers and closes, unless an answer to an earlier request is under way: that one is broken off."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(answer)
        self.transport.close()


def max_connections() -> int:
    """How many connections one proxy keeps."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(files * CONNECTIONS_OF_FILES)


class PlainRequests:
    """What reaches Serve's proxy: requests without instructions to it, and with headers that are text."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = _refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            scope["headers"] = [
                (name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") not in INSTRUCTIONS
            ]
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> Response | None:
    """Serve decodes every value that it looks at, and lists its applications to whoever asks."""
    if scope["path"] == "/-/routes":
        return PlainTextResponse("not served here", 404)
    try:
        for _, value in scope["headers"]:
            value.decode()
    except UnicodeDecodeError:
        return PlainTextResponse("a header's value is not UTF-8", 400)
    return None
