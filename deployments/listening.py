"""On which address Serve listens, as its controller knows it: whether strangers can reach the front door.

Serve gives its HTTP options to no deployment; this is the one place that asks for them by a private name, which the
bound on Ray's version in pyproject.toml keeps. It must not know of requests.
"""

from __future__ import annotations

import ipaddress

import ray

from configs.schema import DoorConfig


def serve_host() -> str | None:
    """The host of `http_options`, None where it cannot be told: outside Serve, or with another Ray."""
    if not ray.is_initialized():
        return None
    try:
        from ray.serve.context import _get_global_client

        client = _get_global_client(raise_if_no_controller_running=False)
        return None if client is None else client.http_config.host
    except (ImportError, AttributeError, ray.exceptions.RayError):
        return None


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches a server that listens on `host`. What is not known counts as reachable."""
    if host is None:
        return False
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def refused_to_strangers(door: DoorConfig, host: str | None) -> str | None:
    """Why a server with this door must not listen on `host`, None where it may."""
    has_keys = door.api_keys_file is not None or door.api_keys_variable is not None
    if has_keys or door.authentication != "auto" or is_loopback(host):
        return None
    return (
        f"the server listens on {host or 'an unknown address'} and has no API keys: set ingress.door.api_keys_file, "
        "listen on 127.0.0.1, or, behind something that authenticates, set "
        'ingress.door.authentication to "none"'
    )
