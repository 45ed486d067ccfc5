"""Images from URLs: `data:` decoded, `http(s)` fetched with the address checked before anything is sent to it.

One parser (httpx's) decides what the host is; its name is resolved once and the connection goes to the address that was
checked, again after each redirect. This module must not know what is done with the bytes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import unquote_to_bytes

import httpx

from configs.schema import FetchConfig

MAX_ESCAPES = 100_000
"""Percent signs in a `data:` URL. A million keeps the event loop busy for seconds; images are sent in base64."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class MediaError(ValueError):
    """An image that could not be had; the message is safe to show to the client."""


class MediaTooLargeError(MediaError):
    """More bytes than the limit."""


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """The bytes of a `data:` URL (RFC 2397), base64 with or without its padding, or percent-encoded.

    Raises:
        MediaError: malformed. MediaTooLargeError: over `max_bytes`, decided before decoding.
    """
    header, separator, payload = url[len("data:") :].partition(",")
    if not separator:
        raise MediaError("the data: URL has no comma before its data")
    in_base64 = header.rpartition(";")[2].strip().lower() == "base64"
    num_escapes = payload.count("%")
    if num_escapes > MAX_ESCAPES:
        raise MediaTooLargeError(f"the data: URL has {num_escapes} percent signs, the limit is {MAX_ESCAPES}")
    num_bytes = len(payload) - 2 * num_escapes  # a percent sign and two digits are one byte
    if in_base64:
        num_bytes = num_bytes * 3 // 4 - 2  # the padding, at most
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the image has {num_bytes} bytes or more, the limit is {max_bytes}")
    try:
        data = unquote_to_bytes(payload)
        if in_base64:
            data = base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except UnicodeError as error:
        raise MediaError("the data: URL is not valid Unicode") from error
    except binascii.Error as error:
        raise MediaError("the data: URL is not valid base64") from error
    if len(data) > max_bytes:
        raise MediaTooLargeError(f"the image has {len(data)} bytes, the limit is {max_bytes}")
    if not data:
        raise MediaError("the data: URL is empty")
    return data


class MediaFetcher:
    """Fetches images. One for each ingress replica."""

    def __init__(self, config: FetchConfig, *, max_bytes: int) -> None:
        self._config = config
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client = httpx.AsyncClient(
            trust_env=False,  # no proxies, no credentials from the environment
            follow_redirects=False,  # each hop is checked here
            timeout=config.timeout_s,
            # A connection is known by its address, and its certificate was checked for one of the names there.
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=[])),
        )

    async def fetch(self, url: str) -> bytes:
        """The bytes behind a `data:`, `http:` or `https:` URL.

        Raises:
            MediaError: refused, unreachable, too slow, or not an answer with status 200.
            MediaTooLargeError: too many bytes.
        """
        if url[:5].lower() == "data:":
            return decode_data_url(url, max_bytes=self._max_bytes)
        if url[:5].lower() != "http:" and url[:6].lower() != "https:":
            raise MediaError("image URLs must start with data:, http: or https:")
        if not self._config.http:
            raise MediaError("http(s) image URLs are switched off on this server; send the image as a data: URL")
        try:
            async with self._slots, asyncio.timeout(self._config.timeout_s):
                return await self._fetch_http(url)
        except TimeoutError as error:
            raise MediaError(f"fetching the image took longer than {self._config.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise MediaError("the image could not be fetched") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _fetch_http(self, url: str) -> bytes:
        target = httpx.URL(url)
        for _ in range(self._config.max_redirects + 1):
            pinned = await self._pin(target)
            # Not compressed, since a few bytes may unpack to gigabytes; images are compressed already.
            headers = {"Host": target.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
            # The certificate is checked against the name, not the address.
            names = {"sni_hostname": target.raw_host.decode("ascii")}
            async with self._client.stream("GET", pinned, headers=headers, extensions=names) as response:
                if response.is_redirect and "location" in response.headers:
                    target = target.join(response.headers["location"])
                    continue
                if response.status_code != 200:
                    raise MediaError(f"fetching the image gave status {response.status_code}")
                return await self._read(response)
        raise MediaError(f"the image URL redirects more than {self._config.max_redirects} times")

    async def _read(self, response: httpx.Response) -> bytes:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise MediaError("the image was sent with a content encoding, which was not asked for")
        chunks, total = [], 0
        async for chunk in response.aiter_raw():
            total += len(chunk)
            if total > self._max_bytes:
                raise MediaTooLargeError(f"the image has more than {self._max_bytes} bytes, the limit")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _pin(self, url: httpx.URL) -> httpx.URL:
        """`url` with the host replaced by an address that was checked."""
        if url.scheme not in ("http", "https") or not url.host:
            raise MediaError("image URLs must start with data:, http: or https:")
        if url.userinfo:
            raise MediaError("image URLs must not carry credentials")
        name = url.raw_host.decode("ascii")
        host = name.lower().rstrip(".")
        domains = [domain.lower() for domain in self._config.allowed_domains]
        if domains and not any(host == domain or host.endswith("." + domain) for domain in domains):
            raise MediaError("the image URL's host is not on this server's list")
        port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
        if not 1 <= port <= 65535:
            raise MediaError(f"the image URL's port is {port}; it must be from 1 to 65535")
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
        if not addresses:
            raise MediaError("the image URL's host has no address")
        if not self._config.allow_private_addresses and not all(is_public(address) for address in addresses):
            raise MediaError("the image URL leads to an address that is not public")
        return url.copy_with(host=str(addresses[0]))


# Of the registries of special-purpose addresses; some Python versions take them for global ones.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001:db8::/32", "3fff::/20")))
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: IpAddress) -> bool:
    """Whether an address is reachable on the open internet; an IPv4 address inside an IPv6 one counts as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not special
