"""A fetch as it is often written: it looks at the address before it starts, then leaves the rest to its client.

Every attack of this folder is shown to work against it, so that no test here passes for want of an attack.
"""

from __future__ import annotations

import gzip
import ipaddress
from collections.abc import Iterable

import httpcore
import httpx

from deployments.ingress.fetch.pinned_network import Resolve, is_public

MAX_HOPS = 30


class _ByName(httpcore.AsyncNetworkBackend):
    """Resolves a name when it connects, as every client does."""

    def __init__(self, resolve: Resolve, network: httpcore.AsyncNetworkBackend) -> None:
        self._resolve = resolve
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect_tcp(self._resolve(host, port)[0], port, timeout)


async def naive_fetch(
    url: str, *, resolve: Resolve, network: httpcore.AsyncNetworkBackend, max_bytes: int | None = None
) -> bytes:
    """The body behind `url`, redirects followed and content unpacked. `max_bytes` ends what would have no end."""
    target = httpx.URL(url)
    first = ipaddress.ip_address(resolve(target.host, 80)[0])
    if not is_public(first):
        raise ValueError("not public")
    async with httpcore.AsyncConnectionPool(network_backend=_ByName(resolve, network)) as pool:
        for _ in range(MAX_HOPS):
            address = httpcore.URL(
                scheme=target.scheme, host=target.host, port=target.port, target=target.raw_path or b"/"
            )
            async with pool.stream("GET", address, headers=[(b"Host", target.netloc)]) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if b"location" in headers:
                    target = target.join(headers[b"location"].decode())
                    continue
                body = b""
                async for piece in response.aiter_stream():
                    body += piece
                    if max_bytes is not None and len(body) > max_bytes:
                        break
                return gzip.decompress(body) if headers.get(b"content-encoding") == b"gzip" else body
    raise ValueError(f"followed {MAX_HOPS} redirects")
