"""RDMA reads from other hosts by NIXL, over the networks that its UCX backend finds: InfiniBand, RoCE, else TCP.

Only this module imports NIXL, when a `NixlMemory` is created, in the process of `rdma_process.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
from typing import Any

INSTALL_COMMAND = "pip install 'vitray[nixl]'"
BACKEND = "UCX"
TRANSPORTS_VARIABLE = "UCX_TLS"
"""Environment variable of UCX by which an operator selects networks."""
MAX_PEERS = 256
"""Maximum number of connections of a process to other processes."""


class NotInstalledError(RuntimeError):
    """NIXL cannot be used in this process."""


class ReadError(RuntimeError):
    """A read failed; nothing more is written into the reader's memory."""


class NixlMemory:
    """RDMA endpoint of this process, for one thread.

    A reader identifies another process by its agent metadata: opaque bytes that may be sent by any means. It has no
    progress thread of NIXL's, which would occupy a whole core while nothing is transferred.
    """

    def __init__(self) -> None:
        """Sets UCX_TLS, unless it is set. Raises NotInstalledError if NIXL cannot be imported, does not start, or lacks
        UCX."""
        # Shared memory does not help between hosts, and with UCX of NIXL 1.5.1 a connection over it aborts this process
        # by a failed assertion when the other process is killed.
        os.environ.setdefault(TRANSPORTS_VARIABLE, "^sm")
        try:
            api, bindings = importlib.import_module("nixl._api"), importlib.import_module("nixl._bindings")
        except ImportError as error:  # a library that it needs may be missing, too
            raise NotInstalledError(f"the package nixl cannot be imported ({error}): {INSTALL_COMMAND}") from error
        # NIXL's exceptions have no common base class; other errors in its bindings are RuntimeErrors.
        names = vars(bindings).values()
        exceptions = [name for name in names if isinstance(name, type) and issubclass(name, Exception)]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *exceptions)
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
            self._agent = api.nixl_agent(f"vitray-{secrets.token_hex(8)}", config)
        except self._errors as error:
            raise NotInstalledError(f"NIXL does not start: {error}") from error
        if BACKEND not in self._agent.backends:
            raise NotInstalledError(f"NIXL has no {BACKEND}; it has {', '.join(self._agent.get_plugin_list())}")
        self._peers: dict[bytes, str] = {}

    def register(self, address: int, num_bytes: int) -> None:
        """Registers memory that others read, or that reads write to, for the lifetime of the process."""
        try:
            self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        except self._errors as error:
            raise NotInstalledError(f"NIXL cannot register {num_bytes} bytes: {error}; see ulimit -l") from error

    def get_agent_metadata(self) -> bytes:
        """Returns the metadata by which others read from this process; to be called after all calls of `register`."""
        return bytes(self._agent.get_agent_metadata())

    def read(self, agent_metadata: bytes, source: int, target: int, num_bytes: int, *, notify: bytes = b"") -> NixlRead:
        """Starts a read from address `source` of the other process to address `target` of this one. The other process
        receives `notify` when the read is done. Raises ReadError."""
        agent = self._agent
        try:
            name = self._connect(agent_metadata)
            ours = agent.get_xfer_descs([(target, num_bytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", ours, theirs, name, notify)
            read = NixlRead(agent, handle, self._errors)
            read.state = agent.transfer(handle)
        except self._errors as error:
            raise ReadError(f"{type(error).__name__}: {error}") from error
        return read

    def disconnect(self, agent_metadata: bytes) -> None:
        """Closes the connection; a later read opens a new one."""
        name = self._peers.pop(agent_metadata, None)
        if name is not None:
            with contextlib.suppress(*self._errors):  # NIXL has forgotten a peer that ended
                self._agent.remove_remote_agent(name)

    def get_notifications(self) -> list[bytes]:
        """Returns readers' notifications. Must be polled often during reads: on some networks that moves the bytes."""
        try:
            return list(itertools.chain.from_iterable(self._agent.get_new_notifs().values()))
        except self._errors:  # a reader ended during the call
            return []

    def _connect(self, agent_metadata: bytes) -> str:
        name = self._peers.get(agent_metadata)
        if name is None:
            while len(self._peers) >= MAX_PEERS:
                self.disconnect(next(iter(self._peers)))
            added = self._agent.add_remote_agent(agent_metadata)
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._peers[agent_metadata] = name
        return name


class NixlRead:
    """A read in flight."""

    def __init__(self, agent: Any, handle: Any, errors: tuple[type[Exception], ...]) -> None:  # noqa: ANN401
        self._agent, self._handle, self._errors = agent, handle, errors
        self.state = "PROC"

    def done(self) -> bool:
        """Whether all bytes have arrived; must be polled until they have. Raises ReadError."""
        try:
            if self.state == "PROC":
                self.state = self._agent.check_xfer_state(self._handle)
            if self.state == "PROC":
                return False
            self._agent.release_xfer_handle(self._handle)
        except self._errors as error:
            raise ReadError(f"{type(error).__name__}: {error}") from error
        if self.state != "DONE":
            raise ReadError(f"NIXL reports the state {self.state}")
        return True
