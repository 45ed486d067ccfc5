"""What clients do that no HTTP library would: broken heads, bodies that never end, hanging up. One connection each.

Each attack returns None, or what was wrong with the server's reaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

REPLY_S = 60.0
HEAD_TOO_LARGE = (431, 400)
"""Ours, and HAProxy's."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    path: str


Attack = Callable[[Address, bytes], Coroutine[Any, Any, str | None]]


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # the server was first
            await writer.wait_closed()


def head(address: Address, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {address.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def replies(address: Address, sent: bytes, *, most: int = 1_000_000) -> bytes:
    """What comes back until the server closes or is silent for a second; a reset counts as a close."""
    async with connected(address) as (reader, writer):
        found = b""
        try:
            writer.write(sent)
            await writer.drain()
            found = await asyncio.wait_for(reader.read(65_536), REPLY_S)
            while len(found) < most and (more := await asyncio.wait_for(reader.read(65_536), 1)):
                found += more
        except (ConnectionError, TimeoutError):
            pass
        return found


def statuses(answers: bytes) -> list[int]:
    """Of each answer in a stream of them."""
    return [int(line[9:12]) for line in answers.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def refused_with(*wanted: int, sent: Sequence[Callable[[Address], bytes]], or_cut_off: bool = False) -> Attack:
    """Sends what is made and wants one answer with one of these statuses and no more.

    `or_cut_off`: who goes on sending to a server that has closed may lose its answer, by TCP's own rules.
    """

    async def attack(address: Address, _: bytes) -> str | None:
        found = statuses(await replies(address, b"".join(part(address) for part in sent)))
        if or_cut_off and not found:
            return None
        return None if len(found) == 1 and found[0] in wanted else f"{found} where one of {wanted} was due"

    return attack


async def half_a_head(address: Address, _: bytes) -> str | None:
    async with connected(address) as (_reader, writer):
        writer.write(head(address)[:-20])
        await writer.drain()
    return None


async def half_a_body(address: Address, body: bytes) -> str | None:
    async with connected(address) as (_reader, writer):
        writer.write(head(address, f"Content-Length: {len(body)}") + body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(0.2)
    return None


async def slow_head(address: Address, _: bytes) -> str | None:
    async with connected(address) as (_reader, writer):
        for byte in head(address)[:12]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.25)
    return None


async def hang_up(address: Address, body: bytes) -> str | None:
    """In the middle of a streamed answer."""
    async with connected(address) as (reader, writer):
        writer.write(head(address, f"Content-Length: {len(body)}") + body)
        first = await asyncio.wait_for(reader.read(400), REPLY_S)
    return None if statuses(first) == [200] else f"a stream began with {first[:200]!r}"


async def reset(address: Address, body: bytes) -> str | None:
    """Before the answer begins, and without a goodbye."""
    async with connected(address) as (_reader, writer):
        writer.write(head(address, f"Content-Length: {len(body)}") + body)
        await writer.drain()
        await asyncio.sleep(0.1)
        made: socket.socket = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return None


ATTACKS: dict[str, Attack] = {
    "half a head": half_a_head,
    "half a body": half_a_body,
    "a slow head": slow_head,
    "hanging up": hang_up,
    "a reset": reset,
    "garbage": refused_with(
        400, sent=[lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n"]
    ),
    "two lengths": refused_with(
        400, sent=[lambda a: head(a, "Content-Length: 2", "Content-Length: 40"), lambda _: b"{}"]
    ),
    "a length and chunks": refused_with(
        400, sent=[lambda a: head(a, "Content-Length: 4", "Transfer-Encoding: chunked"), lambda _: b"0\r\n\r\n"]
    ),
    "a header without end": refused_with(
        *HEAD_TOO_LARGE, sent=[lambda a: head(a)[:-2] + b"X-Long: " + b"x" * 2_000_000], or_cut_off=True
    ),
}
