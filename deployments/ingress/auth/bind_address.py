"""Check of the bind address: without API keys, Serve may listen on loopback only."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import AuthConfig


def is_loopback(host: str | None) -> bool:
    """Whether a server that listens on `host` is reachable from this machine only. False for an unknown address."""
    if host is None:
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def bind_refusal(auth: AuthConfig, host: str | None) -> str | None:
    """Returns why a server with this configuration must not listen on `host`, None if it may."""
    has_keys = auth.api_keys_file is not None or auth.api_keys_env is not None
    if has_keys or auth.mode != "auto" or is_loopback(host):
        return None
    return (
        f"the server listens on {host or 'an unknown address'} and has no API keys: set ingress.auth.api_keys_file, "
        "listen on 127.0.0.1, or, behind something that authenticates, set "
        'ingress.auth.mode to "none"'
    )
