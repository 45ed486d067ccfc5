"""Images from URLs: `data:` decoded, `http(s)` fetched with the address checked before anything is sent to it.

One parser (httpx's) decides what the host is; what it gives goes to the connection in parts and is not parsed again.
Names are resolved and addresses checked in `pinned_network.py`, again after each redirect. The client is httpcore,
which knows no cookies, credentials, proxies or redirects. This module must not know what is done with the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import httpcore
import httpx

from configs.schema import FetchConfig
from deployments.data_url import MediaError, MediaTooLargeError, decode_data_url
from deployments.pinned_network import PinnedNetwork, Resolve, system_resolve

__all__ = ["MediaBusyError", "MediaError", "MediaFetcher", "MediaTooLargeError", "decode_data_url"]

MAX_URL_CHARACTERS = 8192
"""Of an `http(s)` URL; servers take no more."""
KEEP_ALIVE_S = 5.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# A body in chunks of a byte costs a thousand times the work of one in kilobytes, on the loop that all requests share.
FREE_PIECES = 1000
BYTES_A_PIECE = 512


class MediaBusyError(MediaError):
    """Too many fetches are under way."""


class MediaFetcher:
    """Fetches images. One for each ingress replica, used from one event loop."""

    def __init__(
        self,
        config: FetchConfig,
        *,
        max_bytes: int,
        resolve: Resolve = system_resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        """`resolve` and `network` stand in for the system's names and connections."""
        self._config = config
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._slots_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._network = PinnedNetwork(
            allow_private=config.allow_private_addresses,
            timeout_s=config.timeout_s,
            max_lookups=config.max_concurrent,
            resolve=resolve,
            network=network,
        )
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=config.max_concurrent,
            keepalive_expiry=KEEP_ALIVE_S,
            network_backend=self._network,
        )

    async def fetch(self, url: str, *, client: str = "") -> bytes:
        """The bytes behind a `data:`, `http:` or `https:` URL, on behalf of `client`, whose fetches are bounded.

        Raises:
            MediaError: refused, unreachable, too slow, or not an answer with status 200.
            MediaTooLargeError: too many bytes. MediaBusyError: too many fetches, for longer than a fetch may take.
        """
        if url[:5].lower() == "data:":
            return decode_data_url(url, max_bytes=self._max_bytes)
        if url[:5].lower() != "http:" and url[:6].lower() != "https:":
            raise MediaError("image URLs must start with data:, http: or https:")
        if not self._config.http:
            raise MediaError("http(s) image URLs are switched off on this server; send the image as a data: URL")
        async with self._slot(client):
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await self._fetch_http(url)
            except TimeoutError as error:
                raise MediaError(f"fetching the image took longer than {self._config.timeout_s:g} s") from error
            except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
                raise MediaError("the image could not be fetched") from error
            except (httpcore.UnsupportedProtocol, httpx.InvalidURL, OSError, UnicodeError) as error:
                raise MediaError("the image could not be fetched") from error

    async def close(self) -> None:
        await self._pool.aclose()
        self._network.close()

    @asynccontextmanager
    async def _slot(self, client: str) -> AsyncIterator[None]:
        """One of the client's slots, then one of all: who waits for its own holds up nobody else."""
        own = self._slots_of.get(client)
        if own is None:
            self._slots_of[client] = own = asyncio.Semaphore(self._config.max_concurrent_per_client)
        held: list[asyncio.Semaphore] = []
        try:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    for slots in (own, self._slots):
                        await slots.acquire()
                        held.append(slots)
            except TimeoutError as error:
                raise MediaBusyError("too many images are being fetched; try again") from error
            yield
        finally:
            for slots in held:
                slots.release()

    async def _fetch_http(self, url: str) -> bytes:
        target = _parsed(url)
        for _ in range(self._config.max_redirects + 1):
            host, port = self._checked(target)
            address = httpcore.URL(
                scheme=target.scheme.encode("ascii"), host=host.encode("ascii"), port=port, target=target.raw_path
            )
            headers = [
                (b"Host", target.netloc),
                (b"Accept", b"image/*"),
                # Not compressed, since a few bytes may unpack to gigabytes; images are compressed already.
                (b"Accept-Encoding", b"identity"),
                (b"User-Agent", b"vitray"),
            ]
            async with self._pool.stream("GET", address, headers=headers) as response:
                locations = _values(response, b"location")
                if response.status in REDIRECTS and len(locations) == 1:
                    target = target.join(_parsed(locations[0]))
                    continue
                if response.status != 200:
                    raise MediaError(f"fetching the image gave status {response.status}")
                return await self._read(response)
        raise MediaError(f"the image URL redirects more than {self._config.max_redirects} times")

    def _checked(self, url: httpx.URL) -> tuple[str, int]:
        """Host and port to connect to, where everything about the URL is allowed but for the host's addresses."""
        if url.scheme not in ("http", "https") or not url.host:
            raise MediaError("images can be fetched from http: and https: addresses only")
        if url.userinfo:
            raise MediaError("image URLs must not carry credentials")
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        domains = [domain.lower().rstrip(".") for domain in self._config.allowed_domains]
        if domains and not any(host == domain or host.endswith("." + domain) for domain in domains):
            raise MediaError("the image URL's host is not on this server's list")
        port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
        if not 1 <= port <= 65535:
            raise MediaError(f"the image URL's port is {port}; it must be from 1 to 65535")
        return host, port

    async def _read(self, response: httpcore.Response) -> bytes:
        if any(value.lower() != "identity" for value in _values(response, b"content-encoding")):
            raise MediaError("the image was sent with a content encoding, which was not asked for")
        body, num_pieces = bytearray(), 0
        async for piece in response.aiter_stream():
            body += piece
            num_pieces += 1
            if len(body) > self._max_bytes:
                raise MediaTooLargeError(f"the image has more than {self._max_bytes} bytes, the limit")
            if num_pieces > FREE_PIECES + len(body) // BYTES_A_PIECE:
                raise MediaError("the image was sent in too small pieces")
        return bytes(body)


def _parsed(url: str) -> httpx.URL:
    """Raises MediaError or httpx.InvalidURL; what parsers are known to read in different ways is refused outright."""
    if len(url) > MAX_URL_CHARACTERS:
        raise MediaError(f"the image URL has {len(url)} characters, the limit is {MAX_URL_CHARACTERS}")
    if "\\" in url or any(character <= " " or character == "\x7f" for character in url):
        raise MediaError("the image URL holds a backslash, a space or a control character")
    return httpx.URL(url)


def _values(response: httpcore.Response, name: bytes) -> list[str]:
    """All values of a header; raises UnicodeError for bytes that are no text."""
    return [value.decode() for key, value in response.headers if key.lower() == name]
