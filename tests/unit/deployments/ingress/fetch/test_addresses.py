"""Which addresses are public, and which URLs are refused before anything is resolved or connected."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest

from configs.schema import FetchConfig
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.fetch.pinned_network import is_never_allowed, is_public
from deployments.ingress.http.image_parts import MediaError

PUBLIC = [
    "93.184.216.34",
    "8.8.8.8",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "2a00:1450:4001::200e",
    "::ffff:8.8.8.8",  # IPv4-mapped
    "64:ff9b::8.8.8.8",  # NAT64
    "2002:808:808::1",  # 6to4 of 8.8.8.8
]
NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",  # carrier-grade NAT
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.0.1",
    "169.254.169.254",  # cloud metadata
    "168.63.129.16",  # a cloud's own, in a public range
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",
    "192.0.0.192",  # a cloud's metadata address
    "192.0.2.1",  # documentation
    "192.88.99.1",  # deprecated 6to4 relay
    "192.168.1.1",
    "198.18.0.1",  # benchmarking
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",  # multicast
    "239.255.255.255",
    "240.0.0.1",  # reserved
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",  # deprecated IPv4-compatible
    "::8.8.8.8",
    "100::1",  # discard
    "2001:db8::1",  # documentation
    "3fff::1",
    "fc00::1",  # unique local
    "fd00:ec2::254",  # cloud metadata
    "fe80::1",  # link-local
    "fe80::1%eth0",
    "fec0::1",  # deprecated site-local
    "ff02::1",  # multicast
    "ff0e::1",
    "4000::1",  # not assigned
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::8.8.8.8",  # NAT64 of a closed network
    "2002:7f00:1::1",  # 6to4 of 127.0.0.1
    "2002:a9fe:a9fe::1",  # 6to4 of 169.254.169.254
    "2001:0:4136:e378:8000:63bf:f5ff:fffe",  # Teredo of a client at 10.0.0.1
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "192.168.1.1", "::1", "fd00::1", "::ffff:10.0.0.1", "8.8.8.8"]
)
def test_a_closed_network_may_open_its_own_addresses(address: str) -> None:
    assert not is_never_allowed(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "0.0.0.0",
        "::",
        "::7f00:1",  # deprecated IPv4-compatible
        "fe80::1",
        "ff02::1",
        "fd00:ec2::254",
        "::ffff:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "2002:a9fe:a9fe::1",
    ],
)
def test_metadata_and_the_like_are_never_allowed(address: str) -> None:
    """Not even where private addresses are: a cloud answers there with its machine's credentials."""
    assert is_never_allowed(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    assert "not public" in refusal(f"http://{host}/", FetchConfig(http=True, allow_private_addresses=True))


def refusal(url: str, config: FetchConfig) -> str:
    async def fetch() -> str:
        fetcher = MediaFetcher(config, max_bytes=1000)
        try:
            with pytest.raises(MediaError) as refused:
                await fetcher.fetch(url)
        finally:
            await fetcher.close()
        return str(refused.value)

    return asyncio.run(fetch())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*arguments: object, **_: object) -> None:
        raise AssertionError(f"resolved {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", must_not_run)


@pytest.mark.usefixtures("no_network")
def test_http_is_off_by_default() -> None:
    for url in ("http://example.com/a.png", "https://example.com/a.png", "HTTPS://example.com"):
        assert "switched off" in refusal(url, FetchConfig())


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "url",
    ["", "a.png", "/etc/passwd", "file:///etc/passwd", "ftp://example.com/", "//example.com", " http://example.com"],
)
def test_other_schemes_are_refused(url: str) -> None:
    assert "must start with data:, http: or https:" in refusal(url, FetchConfig(http=True))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:password@example.com/", "must not carry credentials"),
        ("http://user@example.com/", "must not carry credentials"),
        ("http://example.com\\@127.0.0.1/", "backslash"),  # parsers disagree about the host
        ("http:\\\\example.com/", "backslash"),
        ("http://example.com/a b", "a space"),
        ("http://:@example.com/", "must not carry credentials"),
        ("http:///a.png", "addresses only"),
        ("http:a.png", "addresses only"),
        ("http://example.com:0/", "port is 0; it must be from 1 to 65535"),
        ("http://example.com:65536/", "port is 65536"),
        ("http://example.com:port/", "could not be fetched"),
        ("http://exam\nple.com/", "control character"),
        ("http://exam\x00ple.com/", "control character"),
        ("http://[::1/", "could not be fetched"),
        ("http://\ud800.com/", "could not be fetched"),
        ("http://example.com/\ud800", "could not be fetched"),
        ("http://" + "a" * 70_000, "70007 characters, the limit is 8192"),
    ],
)
def test_urls_that_are_refused_before_anything_is_resolved(url: str, told: str) -> None:
    assert told in refusal(url, FetchConfig(http=True, allow_private_addresses=True))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::1]", "[::ffff:127.0.0.1]", "localhost"],
)
def test_spellings_of_private_addresses_are_refused(host: str) -> None:
    """What counts is the address that the name resolves to, however it is written."""
    told = refusal(f"http://{host}/", FetchConfig(http=True))
    assert "not public" in told or told == "the file could not be fetched"  # no such spelling on this machine


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("evil.com", ["example.com"]),
        ("badexample.com", ["example.com"]),
        ("example.com.evil.com", ["example.com"]),
        ("example.co", ["example.com"]),
        ("[::1]", ["example.com"]),
        ("com", ["example.com"]),
    ],
)
def test_other_domains_than_the_allowed_are_refused(host: str, allowed: list[str]) -> None:
    config = FetchConfig(http=True, allowed_domains=tuple(allowed), allow_private_addresses=True)
    assert "not on this server's list" in refusal(f"http://{host}/", config)


@pytest.mark.parametrize("host", ["example.com", "EXAMPLE.com", "cdn.example.com", "example.com.", "example.com:8080"])
@pytest.mark.parametrize("allowed", ["example.com", "Example.COM"])
def test_allowed_domains_and_their_subdomains_are_resolved(
    host: str, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def private(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", private)
    assert "not public" in refusal(f"http://{host}/", FetchConfig(http=True, allowed_domains=(allowed,)))


def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(*_: object, **__: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80)),
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606:4700::1", 80, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.168.0.1", 80)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", mixed)
    assert "not public" in refusal("http://example.com/", FetchConfig(http=True))


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert refusal("http://secret-host.internal/", FetchConfig(http=True)) == "the file could not be fetched"
