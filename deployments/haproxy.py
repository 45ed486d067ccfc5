"""The short way through Serve: HAProxy, which hands requests to the ingress replicas directly, in place of Serve's own
proxy, and replicas that run in Serve's own loop. What a Ray needs to be told; it must not know of the application.
"""

from __future__ import annotations

from pathlib import Path


def environment(folder: Path) -> dict[str, str]:
    """Variables for a Ray that starts with them. HAProxy's configuration, socket and state come to lie in `folder`,
    whose path is short: a socket's has 107 bytes at most. Raises ValueError for a longer one.
    """
    socket = folder / "admin.sock"
    if len(str(socket)) > 107:
        raise ValueError(f"{socket} is {len(str(socket))} characters long; a socket's path has 107 at most")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(socket),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
