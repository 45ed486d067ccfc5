"""Raw sockets against the HTTP server that Serve's proxy is, with our bounds and, to see what they are for, without.

`tests/cluster/test_served_proxy.py` tries the same on Serve's own proxy.
"""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import uvicorn
from starlette.requests import Request

from deployments.http_proxy import limits as proxy_bounds
from deployments.http_proxy.limits import BoundedProtocol
from deployments.ingress.deployment import Ingress
from deployments.ingress.http import request_body
from tests.hostile.ingress_server import TEXT, started
from tests.hostile.proxy_server import GOOD, Noted, answered, chunked, flood, good, last, open_head, serving
from tests.hostile.sockets import REPLY_S, Address, connected, head, replies, statuses
from tests.unit.deployments.stand_ins import StandIns

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers before the body was read, as to a client without a key."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("first", "early"),
    [(open_head, False), (chunked, False), (chunked, True)],
    ids=["head", "trailers", "trailers after the answer"],
)
def test_headers_without_end_take_no_memory(first: Callable[[Address], bytes], early: bool) -> None:
    """100 MB of them: uvicorn as Serve starts it keeps every byte, and waits for more.

    Trailers of a chunked body were not counted, since the head was complete: 121 MB of them stayed in one connection.
    `early`: the request is answered before its trailers begin.
    """

    def grown(*, bounded: bool) -> int:
        async def scenario() -> int:
            async with serving(refuse if early else Noted(), bounded=bounded) as address:
                before = tracemalloc.get_traced_memory()[0]
                async with connected(address) as (reader, writer):
                    if early:
                        writer.write(first(address))
                        assert statuses(await reader.readuntil(b"\r\n\r\n")) == [401]
                    await flood(writer, b"" if early else first(address), 100_000_000)
                    if bounded:
                        with suppress(ConnectionError):
                            await asyncio.wait_for(reader.read(), REPLY_S)  # ends when the server has closed
                    found = statuses(await replies(address, last(address)))  # on another connection
                    assert found == [401 if early else 200]
                    return tracemalloc.get_traced_memory()[0] - before

        # Not the process's memory: what earlier tests freed would be filled first.
        tracemalloc.start()
        try:
            return asyncio.run(scenario())
        finally:
            tracemalloc.stop()

    assert grown(bounded=True) < 20_000_000
    assert grown(bounded=False) > 80_000_000


@pytest.mark.parametrize(
    "filler",
    [b"X-Long: " + b"x" * 1_000_000, b"".join(b"X-%d: y\r\n" % number for number in range(100_000))],
    ids=["one header", "many headers"],
)
def test_a_head_over_the_bound(filler: bytes) -> None:
    found, app = answered(lambda address: head(address)[:-2] + filler)
    assert (found, app.requests) == ([431], [])
    found, app = answered(lambda address: b"POST /" + b"x" * 1_000_000)
    assert (found, app.requests) == ([431], [])


@pytest.mark.parametrize("trailers", [b"X-A: b\r\n\r\n", b"".join(b"X-%d: y\r\n" % number for number in range(10_000))])
def test_trailers_close_the_connection(trailers: bytes) -> None:
    """uvicorn appends them to the headers that the application is reading."""
    found, app = answered(lambda address: chunked(address) + trailers)
    assert (found, app.requests) == ([400], [])


@pytest.mark.parametrize(
    "endless",
    [b"X-Long: " + b"x" * 1_000_000, b"2;" + b"x" * 1_000_000],
    ids=["one trailer", "a chunk's extension"],
)
def test_what_is_neither_head_nor_body_is_bounded(endless: bytes) -> None:
    """No callback tells of these bytes before their line ends."""
    start = chunked if endless.startswith(b"X") else lambda a: head(a, "Transfer-Encoding: chunked")
    found, app = answered(lambda address: start(address) + endless)
    assert (found, app.requests) == ([431], [])


def test_small_chunks_may_add_up() -> None:
    """Framing is counted from the last byte of the body: five bytes of it for each byte here, 500 kB in all."""
    request_body = b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n"
    found, app = answered(lambda a: head(a, "Transfer-Encoding: chunked", "Connection: close") + request_body)
    assert found == [200]
    assert [len(request[2]) for request in app.requests] == [100_000]


def test_a_body_that_goes_on_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before its body was read, as without a key: each byte reset uvicorn's own keep-alive timer."""
    monkeypatch.setattr(proxy_bounds, "HEAD_TIMEOUT_S", 0.3)

    async def scenario(*, bounded: bool) -> list[int] | None:
        async with serving(refuse, bounded=bounded) as address, connected(address) as (reader, writer):
            writer.write(head(address, "Content-Length: 1000000"))
            drip = asyncio.create_task(dripping(writer))
            try:
                return statuses(await asyncio.wait_for(all_of(reader), 30 if bounded else 1.5))
            except TimeoutError:
                return None
            finally:
                drip.cancel()

    async def all_of(reader: asyncio.StreamReader) -> bytes:
        """Also where a byte comes after the connection's end, at which the server resets it."""
        received = b""
        with suppress(ConnectionResetError):
            while piece := await reader.read(65536):
                received += piece
        return received

    async def dripping(writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(0.1)
            writer.write(b"x")

    assert asyncio.run(scenario(bounded=True)) == [401]
    assert asyncio.run(scenario(bounded=False)) is None


def test_large_bodies_are_no_heads() -> None:
    """What is counted is a head's bytes: a body of any size passes, also with the next request's head behind it."""
    large = bytes(3_000_000)
    found, app = answered(lambda a: (head(a, f"Content-Length: {len(large)}") + large) * 2 + last(a))
    assert found == [200, 200, 200]
    assert [len(request[2]) for request in app.requests] == [len(large), len(large), len(GOOD)]


@pytest.mark.parametrize(
    "first", [b"", b"\r\n", b"POST /", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: b"]
)
@pytest.mark.parametrize("before", [False, True], ids=["at once", "after a request"])
def test_a_head_that_does_not_end_in_time(first: bytes, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of its own, or one that was used before: its time begins with the first byte then."""
    monkeypatch.setattr(proxy_bounds, "HEAD_TIMEOUT_S", 0.3)
    if before and not first:
        return  # an idle connection is uvicorn's to close

    async def scenario(*, bounded: bool) -> list[int] | None:
        async with serving(Noted(), bounded=bounded) as address, connected(address) as (reader, writer):
            if before:
                writer.write(good(address))
                assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
            writer.write(first)
            drip = asyncio.create_task(dripping(writer))
            try:
                return statuses(await asyncio.wait_for(reader.read(1000), 30 if bounded else 1.5))
            except TimeoutError:
                return None
            finally:
                drip.cancel()

    async def dripping(writer: asyncio.StreamWriter) -> None:
        while first:
            await asyncio.sleep(0.1)
            writer.write(b"x" if first.strip() else b"\r\n")

    assert asyncio.run(scenario(bounded=True)) == [408]
    assert asyncio.run(scenario(bounded=False)) is None


def test_a_head_in_pieces_that_comes_in_time() -> None:
    async def scenario() -> list[int]:
        async with serving(Noted()) as address, connected(address) as (reader, writer):
            for byte in good(address):
                writer.write(bytes([byte]))
                await writer.drain()
            return statuses(await reader.readuntil(b"\r\n\r\n"))

    assert asyncio.run(scenario()) == [200]


def test_a_body_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_bounds, "HEAD_TIMEOUT_S", 0.2)

    async def scenario() -> list[int]:
        async with serving(Noted()) as address, connected(address) as (reader, writer):
            writer.write(good(address)[:-1])
            await asyncio.sleep(0.5)
            writer.write(GOOD[-1:])
            return statuses(await reader.readuntil(b"\r\n\r\n"))

    assert asyncio.run(scenario()) == [200]


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over the bound are told and closed; the others go on."""
    monkeypatch.setattr(proxy_bounds, "max_connections", lambda: 5)

    async def scenario() -> None:
        async with serving(Noted()) as address:
            kept = [await asyncio.open_connection(address.host, address.port) for _ in range(5)]
            assert statuses(await replies(address, b"")) == [503]
            reader, writer = kept[0]
            writer.write(good(address))
            assert statuses(await reader.readuntil(b"\r\n\r\n")) == [200]
            for _, open_writer in kept:
                open_writer.close()
                await open_writer.wait_closed()
            await asyncio.sleep(0.1)
            assert statuses(await replies(address, last(address))) == [200]

    asyncio.run(scenario())
    assert 0 < proxy_bounds.max_connections() < 10**7


# What stands between a head and a request that only one of two servers in a row would see.
AMBIGUOUS = {
    "two lengths": ["Content-Length: 0", f"Content-Length: {len(SMUGGLED)}"],
    "two lengths in one": [f"Content-Length: 0, {len(SMUGGLED)}"],
    "a length and chunks": [f"Content-Length: {len(SMUGGLED) + 5}", "Transfer-Encoding: chunked"],
    "chunks and a length": ["Transfer-Encoding: chunked", "Content-Length: 5"],
    "chunks that are none": ["Transfer-Encoding: xchunked"],
    "chunks and something else": ["Transfer-Encoding: chunked, identity"],
    "chunks twice": ["Transfer-Encoding: identity", "Transfer-Encoding: chunked", "Content-Length: 5"],
    "a space before the colon": ["Transfer-Encoding : chunked"],
    "a vertical tab": ["Transfer-Encoding: \x0bchunked"],
    "a folded header": ["X-A: b", " Transfer-Encoding: chunked"],
    "a length with a sign": [f"Content-Length: +{len(SMUGGLED)}"],
    "a length below zero": ["Content-Length: -1"],
    "a length in hexadecimal": ["Content-Length: 0x0"],
    "a length past 64 bits": ["Content-Length: 18446744073709551617"],
    "a bare line feed": [f"X-A: b\nContent-Length: {len(SMUGGLED)}"],
    "a bare carriage return": [f"X-A: b\rContent-Length: {len(SMUGGLED)}"],
    "a zero byte": ["X-A: b\x00"],
    "a header without a name": [": b"],
    "a header without a colon": ["no colon here"],
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_nothing_is_smuggled(name: str) -> None:
    """Refused outright, or read in one way only: what stands in a body is never a request."""
    found, app = answered(lambda a: head(a, *AMBIGUOUS[name]) + b"0\r\n\r\n" + SMUGGLED)
    assert found[-1:] == [400], found
    assert ("GET", "/smuggled") not in [request[:2] for request in app.requests]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / FTP/1.1\r\n\r\n",
        b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnot hexadecimal\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
        b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ],
)
def test_what_is_no_request(sent: bytes) -> None:
    found, app = answered(lambda _: sent)
    assert found == [400]
    assert app.requests == []


def test_garbage_behind_a_request() -> None:
    """Pipelined: the request is answered, the rest is refused, nothing more is read."""
    found, app = answered(lambda a: good(a) + b"\x00\x01garbage\r\n\r\n" + good(a))
    assert found in ([200, 400], [400])
    assert len(app.requests) <= 1
    found, app = answered(lambda a: good(a) * 19 + last(a))
    assert found == [200] * 20


def test_instructions_to_serve_stop_here() -> None:
    """By them a client would choose replicas, keep what it has left running, and change how long others wait."""
    names = ["serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id", "X-Session-Id", "x_session_id"]
    names += ["X-Request-Timeout-Seconds", "X-Request-Disconnect-Disabled"]
    sent = [f"{name}: ?1" for name in names]
    for bounded, expected in ((True, 0), (False, len(names))):
        _, app = answered(
            lambda a: head(a, *sent, "X-Request-Id: mine", "Connection: close", f"Content-Length: {len(GOOD)}") + GOOD,
            bounded=bounded,
        )
        headers = app.requests[0][3]
        assert headers[b"x-request-id"] == b"mine"
        assert sum(value == b"?1" for value in headers.values()) == expected


@pytest.mark.parametrize(("trusted", "address"), [(None, "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
def test_a_client_cannot_name_its_own_address(
    trusted: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn trusts `X-Forwarded-For` from loopback. Serve's HAProxy connects from there and forwards what the client
    sent, so a client that named another address in each request had no quota. An operator may still name whom to
    trust."""
    monkeypatch.setattr(uvicorn.protocols.http.auto, "AutoHTTPProtocol", BoundedProtocol)
    monkeypatch.setenv(proxy_bounds.TRUSTED_PROXIES, trusted or "")
    if trusted is None:
        monkeypatch.delenv(proxy_bounds.TRUSTED_PROXIES)
    proxy_bounds.bounded()
    _, app = answered(lambda a: good(a, "X-Forwarded-For: 203.0.113.7", "Connection: close"))
    assert app.clients[0] == address


def test_serves_own_list_of_applications_is_closed() -> None:
    found, app = answered(lambda a: b"GET /-/routes HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert (found, app.requests) == ([404], [])
    found, app = answered(lambda a: b"GET /-/healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert found == [200], "load balancers and KubeRay ask for it"


def ingress_app(ingress: Ingress) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await ingress(Request(scope, receive)))(scope, receive, send)

    return app


@pytest.mark.parametrize(
    ("rate", "status"), [(0, 408), (40, 408), (40_000, 200)], ids=["stops", "a byte now and then", "slow, but comes"]
)
def test_a_body_that_comes_too_slowly(rate: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 kB/s are enough where half of one is asked for, although the whole takes longer than the grace."""
    monkeypatch.setattr(request_body, "GRACE_S", 0.5)
    monkeypatch.setattr(request_body, "MIN_BYTES_PER_S", 500)
    whole = json.dumps({**TEXT, "user": "x" * 40_000}).encode()

    async def scenario() -> list[int]:
        ingress = started(monkeypatch, StandIns(), mode="none")
        async with serving(ingress_app(ingress)) as address, connected(address) as (reader, writer):
            writer.write(head(address, f"Content-Length: {len(whole)}"))

            async def sending() -> None:
                for position in range(0, len(whole), max(rate // 10, 1)):
                    writer.write(whole[position : position + rate // 10])
                    await asyncio.sleep(0.1)

            task = asyncio.create_task(sending())
            found = statuses(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10))
            task.cancel()
            assert statuses(await replies(address, last(address))) == [200]
            return found

    assert asyncio.run(scenario()) == [status]


def test_nothing_is_left_of_broken_connections() -> None:
    """Descriptors and memory are where they were after hundreds of each kind."""

    async def scenario() -> tuple[int, int]:
        async with serving(Noted()) as address:
            for turn in range(2):
                for sent in (b"", b"GET", head(address)[:-2], good(address)[:-5], b"\0garbage\r\n\r\n", good(address)):
                    for _ in range(60):
                        async with connected(address) as (_reader, writer):
                            writer.write(sent)
                await asyncio.sleep(0.3)
                if turn == 0:
                    files, memory = psutil.Process(os.getpid()).num_fds(), psutil.Process().memory_info().rss
            return psutil.Process().num_fds() - files, psutil.Process().memory_info().rss - memory

    files, memory = asyncio.run(scenario())
    assert files <= 0
    assert memory < 10_000_000
