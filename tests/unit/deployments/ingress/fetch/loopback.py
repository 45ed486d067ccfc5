"""A small HTTP server on this machine for tests of fetching: each answers as its `respond` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from configs.schema import FetchConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import MediaError

MAX_BYTES = 10_000
OPEN = FetchConfig(http=True, allow_private_addresses=True, timeout_s=5.0)

Respond = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class LoopbackServer:
    """Hands each request's head to `respond`, which writes the answer; then the connection is left to the client."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self.port = 0
        self.connections = 0
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head.decode())
                await self._respond(head.decode(), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(respond: Respond, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[LoopbackServer]:
    server = LoopbackServer(respond)
    listening = await asyncio.start_server(server, host, port)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


@asynccontextmanager
async def fetching(config: FetchConfig = OPEN) -> AsyncIterator[MediaFetcher]:
    fetcher = MediaFetcher(config, max_bytes=MAX_BYTES)
    try:
        yield fetcher
    finally:
        await fetcher.close()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> Respond:
    async def respond(_: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return respond


def redirects(locations: dict[str, str], body: bytes = b"image", status: str = "302 Found") -> Respond:
    async def respond(head: str, writer: asyncio.StreamWriter) -> None:
        location = locations.get(head.split()[1])
        if location is None:
            await answer(body)(head, writer)
        else:
            await answer(b"", f"Location: {location}", status=status)(head, writer)

    return respond


async def refusal(url: str, config: FetchConfig = OPEN, kind: type[MediaError] = MediaError) -> str:
    async with fetching(config) as fetcher:
        with pytest.raises(kind) as refused:
            await fetcher.fetch(url)
    return str(refused.value)
