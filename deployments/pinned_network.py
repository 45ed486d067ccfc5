"""Connections for fetching: a host's name is resolved once, its addresses are checked, and one of them is connected to.

A connection pool that opens its connections here may keep them: each is known by the host's name, its certificate was
checked for that name, and its address when it was opened. This module must not know of URLs, redirects or images.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpcore

from deployments.addresses import IpAddress, is_never_allowed, is_public
from deployments.data_url import MediaError

MAX_ADDRESSES = 4
"""Addresses of one name that are tried, one after the other."""

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port to addresses as text, in the order to try them. Blocks; runs in a thread."""


def system_resolve(host: str, port: int) -> list[str]:
    """As the operating system resolves names. Raises OSError."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class PinnedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections for an httpcore pool, to checked addresses only."""

    def __init__(
        self,
        *,
        allow_private: bool,
        timeout_s: float,
        max_lookups: int,
        resolve: Resolve = system_resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        """`timeout_s` bounds the connecting, all addresses together; `network` is what connects to an address."""
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._network = network or httpcore.AnyIOBackend()
        # A look-up cannot be cancelled: slow name servers keep these threads, and not those that others wait for.
        self._lookups = ThreadPoolExecutor(max_lookups, thread_name_prefix="name look-up")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connects to the first address of `host` that answers.

        Raises:
            MediaError: no address, or one of them is not allowed.
            httpcore.ConnectError, httpcore.ConnectTimeout: none answers. OSError, UnicodeError: not resolvable.
        """
        addresses = await self._checked_addresses(host, port)
        each_s = self._timeout_s / len(addresses)
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, each_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(addresses[-1], port, each_s, local_address, socket_options)

    async def _checked_addresses(self, host: str, port: int) -> list[str]:
        """One address that is not allowed closes the name: whoever mixes them wants the guard to look at another."""
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, self._resolve, host, port)
        addresses = list(dict.fromkeys(map(ipaddress.ip_address, found)))
        if not addresses:
            raise MediaError("the image URL's host has no address")
        if not all(self._allowed(address) for address in addresses):
            raise MediaError("the image URL leads to an address that is not public")
        return [str(address) for address in addresses[:MAX_ADDRESSES]]

    def _allowed(self, address: IpAddress) -> bool:
        return not is_never_allowed(address) if self._allow_private else is_public(address)

    def close(self) -> None:
        """Lets the threads go; look-ups under way end by themselves."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
