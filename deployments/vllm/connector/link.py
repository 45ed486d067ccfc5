"""Messages between the LLM replica and its engine's processes, and the connections of those processes.

vLLM's scheduler process and each worker connect once, when vLLM creates their connectors (`scheduler_link.py`,
`worker_link.py`); the replica's end is `replica_link.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from msgspec import Struct
from msgspec.json import Decoder

from deployments.transfer import unix_socket
from deployments.transfer.unix_socket import Sender
from deployments.vllm.connector.lease_table import EndedLease, EngineLease

ADDRESS_KEY = "vitray_link"
"""Key in vLLM's `ec_connector_extra_config`: the address to which its connectors connect."""
MIN_TOKENS_KEY = "vitray_least_tokens"
"""Key in the same: the minimum number of tokens that are prefilled before all embeddings are available."""
CONNECT_TIMEOUT_S = 60.0
"""Timeout of a connect to the replica."""
MAX_LEASES = 1024
"""Maximum number of leases in one message, so that it fits a packet."""
MAX_DIGESTS = 512
"""Maximum number of digests in one message."""

T = TypeVar("T")


class Role(Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


class Grant(Struct, frozen=True, tag=True):
    """To the scheduler: the engine may load by this lease until `Release`."""

    lease: EngineLease


class Release(Struct, frozen=True, tag=True):
    """To the scheduler: the requests of these leases have ended."""

    leases: list[str]


class Map(Struct, frozen=True, tag=True):
    """To a worker, with a file descriptor: map the memory of an encoder or of the receive buffer."""

    server: str
    num_bytes: int


class Unmap(Struct, frozen=True, tag=True):
    """To a worker: unmap the memory; the encoder has ended, and no lease refers to it."""

    server: str


class Connected(Struct, frozen=True, tag=True):
    """First message of an engine process."""

    role: Role


class Mapped(Struct, frozen=True, tag=True):
    """Answer of a worker to `Map`."""

    server: str
    error: str | None


class Loaded(Struct, frozen=True, tag=True):
    """From a worker: an embedding is on its device."""

    lease: str
    num_bytes: int
    """0 if the device had it already."""
    seconds: float
    """Time since the embedding was ready, by the encoder's clock."""


class LeasesEnded(Struct, frozen=True, tag=True):
    """From the scheduler: nothing more will be loaded by these leases."""

    leases: list[EndedLease]


class Missing(Struct, frozen=True, tag=True):
    """From the scheduler: a request needs embeddings for which there are no leases."""

    request: str
    """vLLM's internal identifier of the request."""
    digests: list[str]


EngineMessage = Connected | Mapped | Loaded | LeasesEnded | Missing
ENGINE_DECODER: Decoder[EngineMessage] = Decoder(EngineMessage)
SCHEDULER_DECODER: Decoder[Grant | Release] = Decoder(Grant | Release)
WORKER_DECODER: Decoder[Map | Unmap] = Decoder(Map | Unmap)


class EngineConnection:
    """Connection of an engine process to the replica."""

    def __init__(self, address: str, role: Role) -> None:
        self._connection = unix_socket.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        self._replica = Sender(self._connection)
        self._replica.send(Connected(role))

    def listen(self, decoder: Decoder[T], handle: Callable[[T, int | None], None]) -> None:
        """Starts a thread that calls `handle` with each message and its file descriptor. The connection ends with the
        thread, which the replica detects."""
        threading.Thread(target=self._listen, args=(decoder, handle), name="engine-link", daemon=True).start()

    def send(self, message: EngineMessage) -> None:
        """Sends a message. No effect if the replica has ended, whose engine is then ended by other means."""
        send_if_connected(self._replica, message)

    def close(self) -> None:
        self._replica.close()

    def _listen(self, decoder: Decoder[T], handle: Callable[[T, int | None], None]) -> None:
        try:
            unix_socket.handle_messages(self._connection, decoder, handle)
        finally:
            self.close()
            self._connection.close()


def send_if_connected(sender: Sender, message: Struct) -> None:
    with contextlib.suppress(OSError):  # a listening thread detects that the peer has ended
        sender.send(message)
