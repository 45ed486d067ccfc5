"""Two Ray nodes on one machine, each in a network namespace of its own, joined by a pair of virtual interfaces: shared
memory of one cannot be read from the other, as between hosts. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_OWNER = os.environ.setdefault("VITRAY_NAMESPACES", str(os.getpid()))
NAMES = (f"vitray-{_OWNER}-a", f"vitray-{_OWNER}-b")
"""Of this process and those that it starts: others may have namespaces of their own at the same time."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
START_S = 90.0


def available() -> bool:
    """Whether namespaces can be created here."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    probe = "vitray-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return made


@contextmanager
def namespaces() -> Iterator[None]:
    """Both namespaces and the link between them."""
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "vitray0", "netns", NAMES[0], "type", "veth", "peer", "name", "vitray0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "vitray0")
            _ip("-n", name, "link", "set", "vitray0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove()


@contextmanager
def ray_nodes(*options: tuple[str, ...]) -> Iterator[None]:
    """A Ray cluster: its head in the first namespace, a node in the second. `options`: of `ray start`, of each node.
    Programs in the first namespace reach the cluster at `ADDRESSES[0]:PORT`."""
    with ExitStack() as stack:
        stack.enter_context(namespaces())
        folder = tempfile.mkdtemp(prefix="vn", dir="/tmp")  # paths of sockets must be short
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = ("--head", f"--port={PORT}", f"--temp-dir={folder}", "--include-dashboard=false")
        for number, given in enumerate(options):
            node = start_node(number, (*given, *(() if number else head)))
            stack.callback(node.wait)
            stack.callback(kill, number)
            if not number:
                _wait_for_head()
        yield


def start_node(number: int, options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Starts a Ray node in one of the namespaces."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = command_in(number, ray, "start", "--block", f"--node-ip-address={ADDRESSES[number]}", *options)
    command += [f"--address={ADDRESSES[0]}:{PORT}"] if number else []
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill(number: int, *, silent: bool = False) -> None:
    """Kills all processes in one of the namespaces at once. `silent`: stops them instead, so that connections stay
    open."""
    found = subprocess.run(["ip", "netns", "pids", NAMES[number]], capture_output=True, text=True, check=False).stdout
    for pid in map(int, found.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if silent else signal.SIGKILL)


def command_in(number: int, *command: str) -> list[str]:
    """Returns the command that runs `command` in one of the namespaces, whose network is private."""
    return ["ip", "netns", "exec", NAMES[number], "env", "RAY_AUTH_MODE=disabled", *command]


def _wait_for_head() -> None:
    probe = f"import socket; socket.create_connection(({ADDRESSES[0]!r}, {PORT}), 1)"
    until = time.monotonic() + START_S
    while subprocess.run(command_in(1, sys.executable, "-c", probe), capture_output=True, check=False).returncode:
        if time.monotonic() > until:
            raise TimeoutError(f"Ray's head did not listen in {START_S} s")
        time.sleep(0.3)


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
