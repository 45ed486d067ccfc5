"""The short way through Serve: HAProxy, which hands requests to the ingress replicas directly, in place of Serve's own
proxy, and replicas that run in Serve's own loop. What a Ray needs to be told; it must not know of the application.
"""

from __future__ import annotations

import os
from pathlib import Path

CLIENT_TIMEOUT, CLIENT_TIMEOUT_S = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", 60
"""For the next byte of a request, and for a client that takes nothing of its answer; Serve's own is an hour. Who waits
for an answer, or for the next token, is not held to it."""


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
        CLIENT_TIMEOUT: os.environ.get(CLIENT_TIMEOUT, str(CLIENT_TIMEOUT_S)),
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
