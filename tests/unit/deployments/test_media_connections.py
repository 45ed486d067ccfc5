"""Where a fetch connects to and what it tells there: the address that was checked, the name, no cookies, no proxies."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from configs.schema import FetchConfig
from tests.unit.deployments.loopback import answer, fetching, refusal, serving


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the name changes its answer between the check and the connection. It is resolved once."""
    asked: list[object] = []

    async def scenario() -> None:
        async with (
            serving(answer(b"checked")) as checked,
            serving(answer(b"rebound"), host="127.0.0.2", port=checked.port) as rebound,
        ):

            def rebinding(host: object, port: int, *_: object, **__: object) -> list[object]:
                asked.append(host)
                address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

            monkeypatch.setattr(socket, "getaddrinfo", rebinding)
            async with fetching() as fetcher:
                assert await fetcher.fetch(f"http://rebind.example:{checked.port}/") == b"checked"
            assert asked == ["rebind.example"]
            assert rebound.connections == 0
            assert f"Host: rebind.example:{checked.port}\r\n" in checked.requests[0]

    asyncio.run(scenario())


def test_the_certificate_is_asked_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to an address; the name goes into the TLS handshake and into the Host header."""
    sent: list[httpx.Request] = []

    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 443))]

    async def record(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(b"image"))

    async def scenario() -> None:
        async with fetching(FetchConfig(http=True)) as fetcher:
            assert await fetcher.fetch("https://b\u00fccher.example:8443/a.png") == b"image"

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", record)
    asyncio.run(scenario())
    (request,) = sent
    assert str(request.url) == "https://93.184.216.34:8443/a.png"
    assert request.headers["host"] == "xn--bcher-kva.example:8443"
    assert request.extensions["sni_hostname"] == "xn--bcher-kva.example"


def test_connections_are_not_kept() -> None:
    """A kept one is known by its address alone: another name at that address would be sent over a connection whose
    certificate was checked for the first."""

    async def scenario() -> None:
        async with serving(answer(b"image")) as server, fetching() as fetcher:
            for _ in range(3):
                await fetcher.fetch(f"{server.url}/")
            assert server.connections == 3

    asyncio.run(scenario())


def test_cookies_are_not_kept() -> None:
    async def scenario() -> None:
        cookie = "Set-Cookie: session=secret; Path=/"

        async def respond(head: str, writer: asyncio.StreamWriter) -> None:
            if head.startswith("GET /first"):
                await answer(b"", cookie, "Location: /second", status="302 Found")(head, writer)
            else:
                await answer(b"image", cookie)(head, writer)

        async with serving(respond) as server, fetching() as fetcher:
            await fetcher.fetch(f"{server.url}/first")
            await fetcher.fetch(f"{server.url}/third")
            assert len(server.requests) == 3
            assert not any("cookie" in request.lower() for request in server.requests)

    asyncio.run(scenario())


def test_proxies_and_credentials_of_the_environment_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))

    async def scenario() -> None:
        async with serving(answer(b"proxied")) as proxy, serving(answer(b"image")) as server:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, proxy.url)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with fetching() as fetcher:
                assert await fetcher.fetch(f"{server.url}/") == b"image"
            assert proxy.connections == 0
            assert "authorization" not in server.requests[0].lower()

    asyncio.run(scenario())


def test_no_message_carries_an_address_or_a_path() -> None:
    async def scenario() -> None:
        async with serving(answer(b"", status="500 Oops")) as server:
            config = FetchConfig(http=True)
            for told in (
                await refusal(f"{server.url}/secret-path"),
                await refusal(f"{server.url}/secret-path", config),
            ):
                assert "127.0.0.1" not in told
                assert "secret" not in told

    asyncio.run(scenario())
