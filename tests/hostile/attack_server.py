"""Web servers that mean harm, on this machine, and a network on which they stand at public addresses.

A test says which address leads to which server; nothing leaves the machine.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpcore

from tests.unit.deployments.ingress.fetch.loopback import LoopbackServer, Respond, answer, serving

IMAGE = b"the image"
SECRET = b"the secret of a server that strangers cannot reach"
PUBLIC, OTHER_PUBLIC = "93.184.216.34", "93.184.216.35"
METADATA = "169.254.169.254"


class MappedNetwork(httpcore.AsyncNetworkBackend):
    """Leads addresses to servers on this machine, and refuses every other."""

    def __init__(self, servers: dict[str, LoopbackServer]) -> None:
        self._servers = servers
        self._network = httpcore.AnyIOBackend()
        self.connected: list[str] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        if host not in self._servers:
            raise httpcore.ConnectError("nobody is there")
        return await self._network.connect_tcp("127.0.0.1", self._servers[host].port, timeout)


class Names:
    """A resolver: each name's answers, one after the other; the last is given again and again."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self._answers:
            return [host]  # an address
        given = self._answers[host]
        return given.pop(0) if len(given) > 1 else given[0]


@asynccontextmanager
async def network(**servers: Respond) -> Any:
    """A MappedNetwork: `public`, `other` and `metadata` stand at the addresses above, `local` at 127.0.0.1."""
    addresses = {"public": PUBLIC, "other": OTHER_PUBLIC, "metadata": METADATA, "local": "127.0.0.1"}
    async with AsyncExitStack() as stack:
        yield MappedNetwork(
            {addresses[name]: await stack.enter_async_context(serving(respond)) for name, respond in servers.items()}
        )


good = answer(IMAGE)
secret = answer(SECRET)


def redirect(location: str) -> Respond:
    return answer(b"", f"Location: {location}", status="302 Found")


def gzip_bomb(num_bytes: int) -> Respond:
    return answer(gzip.compress(bytes(num_bytes)), "Content-Encoding: gzip")


async def endless(_: str, writer: asyncio.StreamWriter) -> None:
    """No length told, no end."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(100_000))
        await writer.drain()


async def endless_redirects(head: str, writer: asyncio.StreamWriter) -> None:
    """To another path each time, so that remembering paths does not help."""
    count = int(head.split()[1].rpartition("/")[2] or 0)
    await redirect(f"/{count + 1}")(head, writer)


async def endless_header(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-Filler: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


async def endless_interim(_: str, writer: asyncio.StreamWriter) -> None:
    """ "The answer will come soon", again and again."""
    while True:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0)


async def drip(_: str, writer: asyncio.StreamWriter) -> None:
    """A byte now and then: no single read takes long."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_header(_: str, writer: asyncio.StreamWriter) -> None:
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Filler: x\r\n" * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def crumbs(_: str, writer: asyncio.StreamWriter) -> None:
    """A body in chunks of one byte, as fast as they are taken."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\nx\r\n" * 10_000)
        await writer.drain()


def wrong_length(stated: int, sent: bytes, *, close: bool) -> Respond:
    async def respond(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % stated + sent)
        await writer.drain()
        if close:
            writer.close()

    return respond
