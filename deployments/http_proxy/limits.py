"""Limits on what Serve's HTTP proxy accepts from clients, before a request reaches the ingress.

Serve's proxy is uvicorn over httptools, which accepts headers of any size and waits for them without a timeout, and
Serve obeys headers that are meant for proxies in front of it. Ray calls `bounded` in each proxy if
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import asyncio
import os
import resource

import uvicorn.protocols.http.auto
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

IMPORT_PATH = "deployments.http_proxy.limits.bounded"
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
TRUSTED_PROXIES = "FORWARDED_ALLOW_IPS"
"""uvicorn's variable: addresses whose `X-Forwarded-For` names the client. None unless an operator lists them."""

MAX_HEAD_BYTES = 131_072
"""Limit on consecutive bytes outside a body: a request line and headers, trailers, or the framing of chunks. The
ingress has a lower limit on complete headers."""
HEAD_TIMEOUT_S = 30.0
"""Seconds from a connection's start, or a later request's first byte, to the end of its headers; and from the end of a
response to the end of its request's body."""
CONNECTIONS_OF_FILES = 0.5
"""Fraction of the process's file descriptors that connections may use; the rest is for the proxy itself."""

# Serve obeys these from any client: the preferred replica, the timeout, whether to ignore a disconnected client.
INSTRUCTIONS = frozenset(
    {b"serve-multiplexed-model-id", b"x-session-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}
)
HEADER_FIELDS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
SERVICE_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def bounded() -> list[Middleware]:
    """Applies the limits to this process's HTTP servers, and returns the middleware that Serve adds to its proxy."""
    # uvicorn's default trusts loopback, from which Serve's HAProxy calls and passes on what clients claim.
    os.environ.setdefault(TRUSTED_PROXIES, "")
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedProtocol
    return [Middleware(PlainRequests)]


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on bytes outside a body, on the time for a request's head, on the time for which a
    body may continue after its response, and on the number of connections. Trailers close the connection."""

    _timeout: asyncio.TimerHandle | None = None
    _in_body = False
    _has_trailers = False
    _bytes_outside_body = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            self._close(SERVICE_UNAVAILABLE)
        else:
            self._start_timeout(REQUEST_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timeout()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timeout is None and not self._in_body:
            self._start_timeout(REQUEST_TIMEOUT)
        self._bytes_outside_body += len(data)  # the callbacks below reset it, so that the limit applies to each read
        super().data_received(data)
        if self._has_trailers:
            self._close(BAD_REQUEST)
        elif self._bytes_outside_body > MAX_HEAD_BYTES:
            self._close(HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._bytes_outside_body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # uvicorn would append trailers to the headers that the application reads
            self._has_trailers = True
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._cancel_timeout()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_outside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._bytes_outside_body = 0
        self._cancel_timeout()
        if not self._has_trailers:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and not self.pipeline and self.cycle.response_complete:
            self._start_timeout(b"")

    def handle_websocket_upgrade(self) -> None:
        """Rejects the upgrade: no route uses WebSockets."""
        self.send_400_response("WebSockets are not served here.")

    def _start_timeout(self, answer: bytes) -> None:
        """Closes the connection with `answer` after HEAD_TIMEOUT_S unless `_cancel_timeout` is called before."""
        self._cancel_timeout()
        self._timeout = self.loop.call_later(HEAD_TIMEOUT_S, self._close, answer)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _close(self, answer: bytes) -> None:
        """Closes the connection. `answer` is sent unless a response has started, which is cut off."""
        self._cancel_timeout()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            self.transport.write(answer)
        self.transport.close()


def max_connections() -> int:
    """Returns the limit on connections of one proxy."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(files * CONNECTIONS_OF_FILES)


class PlainRequests:
    """Middleware that removes instructions to Serve's proxy from requests, and rejects headers that are not text."""

    def __init__(self, app: ASGIApp) -> None:
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
    """Returns the rejection of a request, or None: Serve fails to decode header values that are not UTF-8, and would
    list its applications to any client."""
    if scope["path"] == "/-/routes":
        return PlainTextResponse("not served here", 404)
    try:
        for _, value in scope["headers"]:
            value.decode()
    except UnicodeDecodeError:
        return PlainTextResponse("a header's value is not UTF-8", 400)
    return None
