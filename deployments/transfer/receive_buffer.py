"""Receive buffer of an LLM replica, for embeddings that its engine cannot load from the encoder's memory: those read by
TCP or RDMA. One region caps the bytes in flight; a transfer that does not fit waits for space, up to `timeout_s`.
"""

from __future__ import annotations

import secrets
import threading
import time

from deployments.transfer.header import EMPTY_HEADER, Header
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_memory import Allocation, Arena

TIMEOUT_S = 5.0
"""Time limit of the wait for space, and of a transfer by RDMA."""
WAIT_POLL_S = 0.002
"""Pause between attempts to allocate in a full buffer."""


class ReceivedEmbedding:
    """An embedding in the buffer, which stays in place until `release`."""

    def __init__(self, memory: Allocation, header: Header) -> None:
        self._memory: Allocation | None = memory
        self.header = header
        self.offset = memory.offset
        """Offset of the header in the buffer, in bytes."""

    def release(self) -> None:
        self._memory = None


class ReceiveBuffer:
    """Memory of one LLM replica, which its engine maps. Thread-safe.

    memory = buffer.allocate(HEADER_BYTES + header.num_bytes)
    received = buffer.complete(memory, header)  # once the embedding is in it, HEADER_BYTES from its start
    """

    def __init__(self, num_bytes: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.arena = Arena(num_bytes, purpose="received")
        self.address = f"receive-buffer-{secrets.token_hex(8)}"
        self.file, self.num_bytes, self.timeout_s = self.arena.file, self.arena.num_bytes, timeout_s
        self._turn = threading.Lock()  # held by the first waiting transfer: later ones must not take its space

    def allocate(self, num_bytes: int) -> Allocation:
        """Waits for space. Raises EmbeddingUnavailableError after `timeout_s`, at once if it can never fit."""
        self.check(num_bytes)
        deadline = time.monotonic() + self.timeout_s
        if self._turn.acquire(timeout=self.timeout_s):
            try:
                while (memory := self.try_allocate(num_bytes)) is None and time.monotonic() < deadline:
                    time.sleep(WAIT_POLL_S)
            finally:
                self._turn.release()
            if memory is not None:
                return memory
        raise EmbeddingUnavailableError(f"no room for an embedding of {num_bytes} bytes in {self.timeout_s} s")

    def try_allocate(self, num_bytes: int) -> Allocation | None:
        """Returns None if there is no space now."""
        memory = self.arena.allocate(num_bytes)
        if memory is not None:
            self.arena.write(memory.offset, EMPTY_HEADER)
        return memory

    def check(self, num_bytes: int) -> None:
        """Raises EmbeddingUnavailableError if this many bytes can never fit."""
        if num_bytes > self.num_bytes:
            error = f"an embedding of {num_bytes} bytes does not fit the buffer of {self.num_bytes}"
            raise EmbeddingUnavailableError(error)

    def complete(self, memory: Allocation, header: Header) -> ReceivedEmbedding:
        """Writes the header of an embedding that is complete."""
        self.arena.write(memory.offset, header.to_bytes())
        return ReceivedEmbedding(memory, header)
