"""NIXL as a way into other hosts' memory, over what its UCX finds: InfiniBand, RoCE, else TCP.

The only module that knows NIXL, which is imported when a `NixlMemory` is made. It must not know what is read.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

from deployments.remote_memory import ReadError

INSTALL = "pip install 'vitray[nixl]'"
BACKEND = "UCX"
TRANSPORTS = "UCX_TLS"
"""The operator's choice of networks, for UCX."""
MAX_PEERS = 256
"""Processes that one is connected to."""


class NotInstalledError(RuntimeError):
    """NIXL cannot be used in this process."""


class NixlMemory:
    """One agent of NIXL, without a thread of NIXL's: that one would take a whole core while nothing moves."""

    def __init__(self) -> None:
        """Raises NotInstalledError."""
        try:
            api, bindings = importlib.import_module("nixl._api"), importlib.import_module("nixl._bindings")
        except ImportError as error:  # a library below it may be missing as well
            raise NotInstalledError(f"the package nixl cannot be imported ({error}): {INSTALL}") from error
        # They have no base in common; what is not of NIXL's own comes as a RuntimeError.
        self._errors = (RuntimeError, *(one for one in vars(bindings).values() if _is_error(one)))
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            with _without_shared_memory():
                self._agent = api.nixl_agent(f"vitray-{secrets.token_hex(8)}", config)
        except self._errors as error:
            raise NotInstalledError(f"NIXL does not start: {error}") from error
        if BACKEND not in self._agent.backends:
            raise NotInstalledError(f"NIXL has no {BACKEND}; it has {', '.join(self._agent.get_plugin_list())}")
        self._peers: dict[bytes, str] = {}

    def register(self, address: int, num_bytes: int) -> None:
        try:
            self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        except self._errors as error:
            raise NotInstalledError(f"NIXL cannot register {num_bytes} bytes: {error}; see ulimit -l") from error

    def introduction(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def read(self, introduction: bytes, source: int, target: int, num_bytes: int, *, told: bytes = b"") -> NixlReading:
        agent = self._agent
        try:
            name = self._peer(introduction)
            ours = agent.get_xfer_descs([(target, num_bytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, name, told)
            reading = NixlReading(agent, handle, self._errors)
            reading.state = agent.transfer(handle)
        except self._errors as error:
            raise ReadError(f"{type(error).__name__}: {error}") from error
        return reading

    def forget(self, introduction: bytes) -> None:
        name = self._peers.pop(introduction, None)
        if name is not None:
            with contextlib.suppress(*self._errors):  # a peer that has gone is forgotten already
                self._agent.remove_remote_agent(name)

    def heard(self) -> list[bytes]:
        try:
            return [one for told in self._agent.get_new_notifs().values() for one in told]
        except self._errors:  # a reader has gone in the middle of it
            return []

    def _peer(self, introduction: bytes) -> str:
        name = self._peers.get(introduction)
        if name is None:
            while len(self._peers) >= MAX_PEERS:
                self.forget(next(iter(self._peers)))
            added = self._agent.add_remote_agent(introduction)
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._peers[introduction] = name
        return name


class NixlReading:
    def __init__(self, agent: Any, handle: Any, errors: tuple[type[Exception], ...]) -> None:  # noqa: ANN401
        self._agent, self._handle, self._errors = agent, handle, errors
        self.state = "PROC"

    def ended(self) -> bool:
        try:
            if self.state == "PROC":
                self.state = self._agent.check_xfer_state(self._handle)
            if self.state == "PROC":
                return False
            self._agent.release_xfer_handle(self._handle)
        except self._errors as error:
            raise ReadError(f"{type(error).__name__}: {error}") from error
        if self.state != "DONE":
            raise ReadError(f"NIXL says {self.state}")
        return True


@contextlib.contextmanager
def _without_shared_memory() -> Iterator[None]:
    """For an agent that is made within.

    Shared memory is of no use between hosts, and where UCX of NIXL 1.5.1 has connected over it, it ends this process
    with an assertion once the other one has been killed.
    """
    if TRANSPORTS in os.environ:
        yield
        return
    os.environ[TRANSPORTS] = "^sm"
    try:
        yield
    finally:
        del os.environ[TRANSPORTS]  # engines may use UCX as well, on one host


def _is_error(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, Exception)
