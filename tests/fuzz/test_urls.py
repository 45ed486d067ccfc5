"""URLs at random, against a network that notes every connection: none is ever made to an address that is not public,
and the host that was resolved is the one that the request names."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any

import httpcore
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.schema import FetchConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.fetch.pinned_network import is_public
from deployments.ingress.http.image_parts import MediaError
from tests.fuzz.shares import IN_PROCESS

pytestmark = pytest.mark.usefixtures("certificates_read_once")
ADDRESSES = ("93.184.216.34", "127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1", "2606:4700::1111")
HOSTS = (*ADDRESSES, "[::1]", "[::ffff:7f00:1]", "localhost", "a.example", "inner.example", "2130706433", "0x7f.1", "0")
PIECES = st.one_of(
    st.sampled_from([*HOSTS, "http://", "https://", "http:", "//", "/", "\\", "@", ":", "#", "?", ".", "%2f", "%00"]),
    st.sampled_from(
        ["HTTP://", "data:", "file://", ":80", ":443", ":0", ":65536", "user", "。", "①", "\t", "\r\n", " "]
    ),
    st.text(max_size=3),
)
URL = st.one_of(
    st.lists(PIECES, max_size=7).map("".join),
    st.tuples(st.sampled_from(["http://", "https://"]), st.lists(PIECES, max_size=5)).map(
        lambda p: p[0] + "".join(p[1])
    ),
)


class Noted(httpcore.AsyncMockBackend):
    """Answers every connection with a redirect, then with an image."""

    def __init__(self, location: str) -> None:
        head = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "
        image = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage"
        answer = location.encode("utf-8", "replace").replace(b"\r", b"").replace(b"\n", b"")
        super().__init__([])
        self._answers = [head + answer + b"\r\n\r\n", image]
        self.connected: list[str] = []
        self.sent: list[bytes] = []

    async def connect_tcp(self, host: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        stream = httpcore.AsyncMockStream([self._answers.pop(0) if self._answers else b""])
        write = stream.write

        async def kept(buffer: bytes, *_: Any, **__: Any) -> None:
            self.sent.append(buffer)
            await write(buffer)

        stream.write = kept  # type: ignore[method-assign]
        return stream


def check(url: str, location: str) -> None:
    resolved: list[str] = []

    def resolve(host: str, _: int) -> list[str]:
        resolved.append(host)
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            inner = host in ("localhost", "inner.example") or host.replace("x", "").replace(".", "").isdigit()
            return ["127.0.0.1"] if inner else ["93.184.216.34"]

    async def fetch() -> None:
        network = Noted(location)
        fetcher = MediaFetcher(FetchConfig(http=True), max_bytes=1000, resolve=resolve, network=network)
        told = ""
        try:
            await fetcher.fetch(url)
        except MediaError as error:
            told = str(error)
        finally:
            await fetcher.close()
        assert not any(address in told for address in ADDRESSES)
        assert all(is_public(ipaddress.ip_address(address)) for address in network.connected)
        named = [line[6:] for sent in network.sent for line in sent.split(b"\r\n") if line.startswith(b"Host: ")]
        assert len(named) == len(network.connected) <= len(resolved)
        for host, name in zip(resolved, named, strict=False):
            assert host in name.decode("ascii").lower()

    asyncio.run(fetch())


def test_urls_and_redirects(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["urls and redirects"])
    @given(URL, URL)
    @example("http://a.example\\@127.0.0.1/", "")
    @example("http://a.example#@127.0.0.1/", "//127.0.0.1")
    @example("http://a.example/", "http://127.0.0.1\\@a.example/")
    @example("http://①②⑦.⓪.⓪.①/", "")
    def fuzz(url: str, location: str) -> None:
        check(url, location)

    fuzz()
