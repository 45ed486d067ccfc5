"""Which addresses a fetch may connect to. Pure functions; this module must not know of names, sockets or HTTP.

An IPv4 address that travels inside an IPv6 one (mapped, NAT64, 6to4, Teredo) counts as itself.
"""

from __future__ import annotations

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def _networks(*names: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(map(ipaddress.ip_network, names))


# Of the registries of special-purpose addresses; some Python versions take them for global ones. The last is the wire
# server of Azure's machines, in a public range and reachable from inside only.
_NOT_PUBLIC = _networks("192.0.0.0/24", "192.88.99.0/24", "2001:db8::/32", "3fff::/20", "168.63.129.16/32")
# Where clouds answer their own machines with credentials, outside the link-local range.
_METADATA = _networks(
    "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd20:ce::254/128"
)
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


def is_public(address: IpAddress) -> bool:
    """Whether an address is reachable on the open internet."""
    inner = inner_ipv4(address)
    if inner is not None:
        return is_public(inner)
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not special


def is_never_allowed(address: IpAddress) -> bool:
    """Whether an address is closed even where private ones are open: no web server of a closed network has it.

    Link-local and with it the clouds' metadata, the metadata addresses elsewhere, multicast, broadcast, unspecified and
    reserved ranges.
    """
    inner = inner_ipv4(address)
    if inner is not None:
        return is_never_allowed(inner)
    if address.is_loopback:  # IPv6's is in a range that is otherwise reserved
        return False
    if isinstance(address, ipaddress.IPv6Address) and address in _COMPATIBLE:
        return True
    named = any(address in network for network in _METADATA)
    return named or address.is_link_local or address.is_multicast or address.is_reserved or address.is_unspecified


def inner_ipv4(address: IpAddress) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to, None where there is none."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
