"""Loads files from URLs: decodes `data:` URLs and fetches `http(s)` URLs with an SSRF guard.

httpx parses each URL once, and its parts are passed to the connection without a second parser. `pinned_network.py`
resolves names and checks addresses, again after each redirect. The client is httpcore, which has no cookies,
credentials, proxies or redirects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

import httpcore
import httpx

from configs.schema import FetchConfig
from deployments.ingress.fetch.pinned_network import PinnedNetwork, Resolve, system_resolve
from deployments.ingress.http.image_parts import MediaError, MediaTooLargeError, decode_data_url, is_data_url

MAX_URL_CHARACTERS = 8192
"""Maximum length of an `http(s)` URL; servers accept no longer ones."""
KEEP_ALIVE_S = 5.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# One-byte chunks cost a thousand times the work of kilobyte chunks, on the event loop that all requests share.
NUM_FREE_CHUNKS = 1000
MIN_BYTES_PER_CHUNK = 512


def ignore_bytes(_num_bytes: int) -> None:
    """Ignores the bytes; the default of `count`."""


class MediaBusyError(MediaError):
    """Too many fetches are in flight."""


class MediaFetcher:
    """Fetches files with bounded concurrency. Each ingress replica has one and uses it from one event loop.

    file = await MediaFetcher(config, max_bytes=limit).fetch(url, client="team-a")
    """

    def __init__(
        self,
        config: FetchConfig,
        *,
        max_bytes: int,
        resolve: Resolve = system_resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        """`max_bytes` bounds one file. `resolve` and `network` replace the system's resolver and network in tests."""
        self._config = config
        self._max_bytes = max_bytes
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._client_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
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

    async def fetch(
        self,
        url: str,
        *,
        max_bytes: int | None = None,
        client: str = "",
        count: Callable[[int], None] = ignore_bytes,
    ) -> bytes:
        """Returns the file of a `data:`, `http:` or `https:` URL, fetched in a slot of `client`.

        `count` is called with the size of each received chunk, and its exceptions are passed on. `max_bytes` bounds
        this file in place of the fetcher's bound.

        Raises:
            MediaError: the URL is refused, or its server is unreachable, too slow or answers with another status than
                200.
            MediaTooLargeError: the file has more than `max_bytes`.
            MediaBusyError: no slot became free within `timeout_s`.
        """
        max_bytes = max_bytes or self._max_bytes
        if is_data_url(url):
            return decode_data_url(url, max_bytes=max_bytes)
        if url[:5].lower() != "http:" and url[:6].lower() != "https:":
            raise MediaError("URLs must start with data:, http: or https:")
        if not self._config.http:
            raise MediaError("http(s) URLs are switched off on this server; send the file as a data: URL")
        async with self._slot(client):
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    return await self._fetch_http(url, max_bytes, count)
            except TimeoutError as error:
                raise MediaError(f"fetching the file took longer than {self._config.timeout_s:g} s") from error
            except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
                raise MediaError("the file could not be fetched") from error
            except (httpcore.UnsupportedProtocol, httpx.InvalidURL, OSError, UnicodeError) as error:
                raise MediaError("the file could not be fetched") from error

    async def close(self) -> None:
        await self._pool.aclose()
        self._network.close()

    @asynccontextmanager
    async def _slot(self, client: str) -> AsyncIterator[None]:
        """Acquires a slot of the client, then a shared one: a client at its own limit does not block others."""
        own = self._client_slots.setdefault(client, asyncio.Semaphore(self._config.max_concurrent_per_client))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    await held.enter_async_context(own)
                    await held.enter_async_context(self._slots)
            except TimeoutError as error:
                raise MediaBusyError("too many files are being fetched; try again") from error
            yield

    async def _fetch_http(self, url: str, max_bytes: int, count: Callable[[int], None]) -> bytes:
        target = _parse_url(url)
        for _ in range(self._config.max_redirects + 1):
            host, port = self._check_url(target)
            address = httpcore.URL(
                scheme=target.scheme.encode("ascii"), host=host.encode("ascii"), port=port, target=target.raw_path
            )
            headers = [
                (b"Host", target.netloc),
                (b"Accept", b"image/*, audio/*, video/*"),
                # No compression: a few bytes may expand to gigabytes, and media are compressed already.
                (b"Accept-Encoding", b"identity"),
                (b"User-Agent", b"vitray"),
            ]
            async with self._pool.stream("GET", address, headers=headers) as response:
                locations = _header_values(response, b"location")
                if response.status in REDIRECTS and len(locations) == 1:
                    # Browsers follow a location with spaces, too.
                    target = target.join(_parse_url(locations[0].replace(" ", "%20")))
                    continue
                if response.status != 200:
                    raise MediaError(f"fetching the file gave status {response.status}")
                return await self._read_body(response, max_bytes, count)
        raise MediaError(f"the URL redirects more than {self._config.max_redirects} times")

    def _check_url(self, url: httpx.URL) -> tuple[str, int]:
        """Returns host and port of an allowed URL. The host's addresses are checked later, by PinnedNetwork.

        Raises MediaError for a URL that is not allowed.
        """
        if url.scheme not in ("http", "https") or not url.host:
            raise MediaError("files can be fetched from http: and https: addresses only")
        if url.userinfo:
            raise MediaError("URLs must not carry credentials")
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        domains = [domain.lower().rstrip(".") for domain in self._config.allowed_domains]
        if domains and not any(host == domain or host.endswith("." + domain) for domain in domains):
            raise MediaError("the URL's host is not on this server's list")
        port = url.port if url.port is not None else {"http": 80, "https": 443}[url.scheme]
        if not 1 <= port <= 65535:
            raise MediaError(f"the URL's port is {port}; it must be from 1 to 65535")
        return host, port

    async def _read_body(self, response: httpcore.Response, max_bytes: int, count: Callable[[int], None]) -> bytes:
        if any(value.lower() not in ("", "identity") for value in _header_values(response, b"content-encoding")):
            raise MediaError("the file was sent with a content encoding, which was not asked for")
        body, num_pieces = bytearray(), 0
        async for piece in response.aiter_stream():
            count(len(piece))
            body += piece
            num_pieces += 1
            if len(body) > max_bytes:
                raise MediaTooLargeError(f"the file has more than {max_bytes} bytes, the limit")
            if num_pieces > NUM_FREE_CHUNKS + len(body) // MIN_BYTES_PER_CHUNK:
                raise MediaError("the file was sent in too small pieces")
        return bytes(body)


def _parse_url(url: str) -> httpx.URL:
    """Parses `url`. Raises httpx.InvalidURL, or MediaError for characters on which parsers disagree."""
    if len(url) > MAX_URL_CHARACTERS:
        raise MediaError(f"the URL has {len(url)} characters, the limit is {MAX_URL_CHARACTERS}")
    if "\\" in url or any(character <= " " or character == "\x7f" for character in url):
        raise MediaError("the URL holds a backslash, a space or a control character")
    return httpx.URL(url)


def _header_values(response: httpcore.Response, name: bytes) -> list[str]:
    """Returns all values of a header. Raises UnicodeError for values that are not UTF-8."""
    return [value.decode() for key, value in response.headers if key.lower() == name]
