"""Raw sockets against Serve's own HTTP proxy, with our bounds in it: what it refuses, and what it no longer obeys."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.cluster.served import ServedApp
from tests.hostile.sockets import ATTACKS, Address, head, replies, statuses
from tests.waiting import until

pytestmark = pytest.mark.slow

STREAM = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()


@pytest.fixture
def address(app: ServedApp) -> Address:
    url = httpx.URL(app.url)
    return Address(url.host, url.port or 80, url.path + "/v1/chat/completions")


def sent(address: Address, data: bytes) -> list[int]:
    return statuses(asyncio.run(replies(address, data)))


def is_well(app: ServedApp) -> bool:
    body = {"messages": [{"role": "user", "content": "x"}]}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("name", ATTACKS)
def test_a_broken_connection_hurts_nobody(name: str, app: ServedApp, address: Address) -> None:
    assert asyncio.run(ATTACKS[name](address, STREAM)) is None
    assert is_well(app)


def test_headers_without_end(address: Address) -> None:
    assert sent(address, head(address)[:-2] + b"".join(b"X-%d: y\r\n" % number for number in range(100_000))) == [431]


@pytest.mark.parametrize("name", ["X-Request-Id", "X-Request-Disconnect-Disabled", "serve_multiplexed_model_id"])
def test_headers_that_are_no_text(name: str, address: Address) -> None:
    """Serve decodes these before anything of ours is asked, and would answer 500."""
    assert sent(address, head(address, "Connection: close")[:-2] + name.encode() + b": \xff\xfe\r\n\r\n") == [400]


def test_who_leaves_cannot_keep_a_request_going(app: ServedApp, address: Address) -> None:
    """By a header that Serve takes from balancers before it."""
    before = app.llm("state")["disconnects"]
    instruction = f"X-Request-Disconnect-Disabled: ?1\r\nContent-Length: {len(STREAM)}"
    assert asyncio.run(ATTACKS["hanging up"](address, STREAM)) is None
    until(lambda: app.llm("state")["disconnects"] == before + 1, "the end of a request without the header")

    async def leave() -> bytes:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head(address, instruction) + STREAM)
        first = await reader.read(400)
        writer.close()
        await writer.wait_closed()
        return first

    assert statuses(asyncio.run(leave())) == [200]
    until(lambda: app.llm("state")["disconnects"] == before + 2, "the end of a request with the header")


def test_serves_own_routes(app: ServedApp) -> None:
    root = app.url.rpartition("/")[0]
    assert httpx.get(root + "/-/routes", timeout=60).status_code == 404
    assert httpx.get(root + "/-/healthz", timeout=60).status_code == 200


def test_websockets_are_not_served(address: Address) -> None:
    upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="]
    assert sent(address, head(address, *upgrade, method="GET")) == [400]
