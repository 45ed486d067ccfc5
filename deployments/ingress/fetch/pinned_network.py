"""SSRF guard for fetches: resolves a host name once, checks its addresses, and connects to one of them.

A connection pool may reuse these connections: it finds them by host name, and certificate and address were checked when
each was opened. IPv4 addresses embedded in IPv6 ones (mapped, NAT64, 6to4, Teredo) are checked as IPv4 addresses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpcore

from deployments.ingress.http.image_parts import MediaError

MAX_ADDRESSES = 4
"""Addresses of one name that are tried, in order."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""Resolves host and port to addresses, in the order to try them. It may block: it is called in a thread."""


def system_resolve(host: str, port: int) -> list[str]:
    """Resolves with the operating system's resolver. Raises OSError."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _networks(*names: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(map(ipaddress.ip_network, names))


# From the registries of special-purpose addresses; some Python versions treat them as global. The last one is Azure's
# WireServer: a public address that only Azure's virtual machines can reach.
_NOT_PUBLIC = _networks("192.0.0.0/24", "192.88.99.0/24", "2001:db8::/32", "3fff::/20", "168.63.129.16/32")
# Cloud metadata services, which hand out credentials, outside the link-local range.
_METADATA = _networks(
    "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd20:ce::254/128"
)
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


class PinnedNetwork(httpcore.AsyncNetworkBackend):
    """Opens connections to checked addresses only, for an httpcore pool."""

    def __init__(
        self,
        *,
        allow_private: bool,
        timeout_s: float,
        max_lookups: int,
        resolve: Resolve = system_resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        """`timeout_s` bounds the attempts to connect to all addresses together; `network` opens the connections."""
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._network = network or httpcore.AnyIOBackend()
        # A look-up cannot be cancelled: slow name servers may block these threads, but not asyncio's default ones.
        self._lookups = ThreadPoolExecutor(max_lookups, thread_name_prefix="name look-up")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connects to the first address of `host` that accepts.

        Raises:
            MediaError: the host has no address, or one that is not allowed.
            httpcore.ConnectError, httpcore.ConnectTimeout: no address accepts.
            OSError, UnicodeError: the name cannot be resolved.
        """
        addresses = await self._resolve_and_check(host, port)
        each_s = self._timeout_s / len(addresses)
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, each_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(addresses[-1], port, each_s, local_address, socket_options)

    async def _resolve_and_check(self, host: str, port: int) -> list[str]:
        """Resolves `host`. A single address that is not allowed refuses the host: a mix suggests an attempt to bypass
        the guard."""
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, self._resolve, host, port)
        addresses = list(dict.fromkeys(map(ipaddress.ip_address, found)))
        if not addresses:
            raise MediaError("the URL's host has no address")
        if not all(self._is_allowed(address) for address in addresses):
            raise MediaError("the URL leads to an address that is not public")
        return [str(address) for address in addresses[:MAX_ADDRESSES]]

    def _is_allowed(self, address: IpAddress) -> bool:
        return not is_never_allowed(address) if self._allow_private else is_public(address)

    def close(self) -> None:
        """Shuts the look-up threads down without waiting for look-ups in flight."""
        self._lookups.shutdown(wait=False, cancel_futures=True)


def is_public(address: IpAddress) -> bool:
    """Whether an address is reachable on the public internet."""
    inner = embedded_ipv4(address)
    if inner is not None:
        return is_public(inner)
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not special


def is_never_allowed(address: IpAddress) -> bool:
    """Whether an address is blocked even if private ones are allowed, since no web server in a closed network has it.

    These are link-local addresses, cloud metadata services, multicast, broadcast, unspecified and reserved ranges.
    """
    inner = embedded_ipv4(address)
    if inner is not None:
        return is_never_allowed(inner)
    if address.is_loopback:  # ::1 lies in a reserved range
        return False
    if isinstance(address, ipaddress.IPv6Address) and address in _COMPATIBLE:
        return True
    named = any(address in network for network in _METADATA)
    return named or address.is_link_local or address.is_multicast or address.is_reserved or address.is_unspecified


def embedded_ipv4(address: IpAddress) -> ipaddress.IPv4Address | None:
    """Returns the IPv4 address embedded in an IPv6 address, None if there is none."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
