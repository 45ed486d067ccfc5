"""Where a fetch connects to and what it tells there: the address that was checked, the name, no cookies, no proxies."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpcore
import pytest

from configs.schema import FetchConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import MediaError
from tests.unit.deployments.ingress.fetch.loopback import MAX_BYTES, OPEN, answer, fetching, refusal, serving


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


class Handshakes(httpcore.AsyncMockBackend):
    """Answers every connection with an image and notes addresses and the names asked for in TLS handshakes."""

    def __init__(self) -> None:
        super().__init__([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage"])
        self.connected: list[tuple[str, int]] = []
        self.names: list[str | None] = []
        self.sent = b""

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.connected.append((host, port))
        stream = await super().connect_tcp(host, port)
        write = stream.write

        async def noted(ssl_context: Any, server_hostname: str | None = None, *_: Any, **__: Any) -> Any:
            self.names.append(server_hostname)
            return stream

        async def kept(buffer: bytes, *_: Any, **__: Any) -> None:
            self.sent += buffer
            await write(buffer)

        stream.start_tls, stream.write = noted, kept  # type: ignore[method-assign]
        return stream


def test_the_certificate_is_asked_for_the_name() -> None:
    """The connection goes to an address; the name goes into the TLS handshake and into the Host header."""
    network = Handshakes()

    async def scenario() -> None:
        fetcher = MediaFetcher(
            FetchConfig(http=True), max_bytes=MAX_BYTES, resolve=lambda *_: ["93.184.216.34"], network=network
        )
        assert await fetcher.fetch("https://b\u00fccher.example.:8443/a.png?b") == b"image"
        await fetcher.close()

    asyncio.run(scenario())
    assert network.connected == [("93.184.216.34", 8443)]
    assert network.names == ["xn--bcher-kva.example"]
    assert network.sent.startswith(b"GET /a.png?b HTTP/1.1\r\nHost: xn--bcher-kva.example.:8443\r\n")


def test_connections_are_kept_for_the_name_alone() -> None:
    """Another name at the same address gets a connection of its own, whose certificate is checked for that name."""

    async def scenario() -> None:
        async with serving(answer(b"image")) as server, fetching() as fetcher:
            for host in ("127.0.0.1", "127.0.0.1", "localhost", "localhost", "127.0.0.1"):
                await fetcher.fetch(f"http://{host}:{server.port}/")
            assert server.connections == 2

    asyncio.run(scenario())


def test_all_addresses_of_a_name_are_tried() -> None:
    async def scenario() -> None:
        async with serving(answer(b"image"), host="127.0.0.3") as server:
            tried = ["127.0.0.2", "::1", "127.0.0.3", "127.0.0.4"]
            fetcher = MediaFetcher(OPEN, max_bytes=MAX_BYTES, resolve=lambda *_: tried)
            assert await fetcher.fetch(f"http://several.example:{server.port}/") == b"image"
            none = MediaFetcher(OPEN, max_bytes=MAX_BYTES, resolve=lambda *_: ["127.0.0.2", "127.0.0.4"])
            with pytest.raises(MediaError, match="could not be fetched"):
                await none.fetch(f"http://several.example:{server.port}/")
            await fetcher.close()
            await none.close()

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
