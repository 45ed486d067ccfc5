"""The HTTP server that Serve's proxy is, with an application that notes its requests, and what clients send to it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.http_proxy.limits import BoundedProtocol, PlainRequests
from tests.hostile.ingress_server import CHAT, SERVE_KEEP_ALIVE_S, TEXT
from tests.hostile.sockets import Address, head, replies, statuses

GOOD = json.dumps(TEXT).encode()


class Noted:
    """An application that answers 200 to everything and notes what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes, dict[bytes, bytes]]] = []
        self.clients: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        request_body = await Request(scope, receive).body()
        self.clients.append(scope["client"][0])
        self.requests.append((scope["method"], scope["path"], request_body, dict(scope["headers"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serving(app: Any, *, bounded: bool = True) -> AsyncIterator[Address]:
    """As Serve sets its server up."""
    protocol = BoundedProtocol if bounded else HttpToolsProtocol
    wrapped = PlainRequests(app) if bounded else app
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            wrapped, http=protocol, log_level="critical", lifespan="off", timeout_keep_alive=SERVE_KEEP_ALIVE_S
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it by this alone
            await asyncio.sleep(0.01)
        try:
            yield Address("127.0.0.1", listening.getsockname()[1], CHAT)
        finally:
            server.should_exit = True
            server.force_exit = True
            with suppress(asyncio.CancelledError):
                await task


def good(address: Address, *headers: str) -> bytes:
    return head(address, f"Content-Length: {len(GOOD)}", *headers) + GOOD


def last(address: Address) -> bytes:
    """A good request after which the server closes."""
    return good(address, "Connection: close")


def answered(sent: Callable[[Address], bytes], *, bounded: bool = True) -> tuple[list[int], Noted]:
    """The statuses of all answers on one connection, after which a good request is answered on another."""

    async def scenario() -> tuple[list[int], Noted]:
        app = Noted()
        async with serving(app, bounded=bounded) as address:
            found = statuses(await replies(address, sent(address)))
            asked = len(app.requests)
            assert statuses(await replies(address, last(address))) == [200]
            del app.requests[asked:]
        return found, app

    return asyncio.run(scenario())


def chunked(address: Address) -> bytes:
    """A request whose body has ended but for its trailers."""
    return head(address, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n"


def open_head(address: Address) -> bytes:
    return head(address)[:-2]


async def flood(writer: asyncio.StreamWriter, first: bytes, num_bytes: int) -> None:
    """Sends headers without an end until the server has enough."""
    with suppress(ConnectionError):
        writer.write(first)
        for number in range(num_bytes // 50_000):
            writer.write(f"X-{number}: ".encode() + b"y" * 50_000 + b"\r\n")
            await writer.drain()
