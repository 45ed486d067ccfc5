"""Language model's side of RDMA: reads embeddings of encoders' memory into the receive buffer.

The header is verified together with the bytes and once more after them: the memory may be reused during a read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from deployments.common.messages import RemoteLocation, SharedEmbedding
from deployments.transfer.header import HEADER_BYTES, Header, WrongEmbeddingError, verify_header
from deployments.transfer.rdma import ReadError
from deployments.transfer.rdma_process import RdmaProcess, Read
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_memory import Allocation

logger = logging.getLogger("ray.serve")

POLL_S = 0.0002
"""Pause between polls of the reads in flight."""
ABANDONED_POLL_S = 0.05
"""Pause between polls if all reads in flight were abandoned."""


@dataclass
class _Pending:
    header: Header
    num_bytes: int
    source: RemoteLocation
    deadline: float
    received: Future[ReceivedEmbedding]
    memory: Allocation | None = None
    read: Read | None = None
    is_body_read: bool = False
    """All bytes were read; the header is being read again."""


class RemoteReader:
    """All RDMA reads of one LLM replica. Thread-safe; its own thread starts and polls the reads.

    reader = RemoteReader(RdmaProcess(), buffer)
    received = reader.receive(image).result()
    received.release()
    """

    def __init__(self, rdma: RdmaProcess, buffer: ReceiveBuffer) -> None:
        """`rdma`: not started. Raises NotInstalledError if NIXL cannot be used."""
        rdma.start(buffer.arena)
        self._rdma, self._buffer = rdma, buffer
        self.timeout_s = buffer.timeout_s
        self._requests: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._pending: list[_Pending] = []
        self._connected: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="remote-reader", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the reading thread is running."""
        return self._thread.is_alive()

    def receive(self, image: SharedEmbedding) -> Future[ReceivedEmbedding]:
        """Reads an embedding that an encoder published for RDMA. The future raises EmbeddingUnavailableError.

        Raises ValueError for an embedding without a remote location, EmbeddingUnavailableError for one that does not
        fit the buffer.
        """
        if image.remote is None:
            raise ValueError("the embedding was not published for RDMA")
        num_bytes = image.num_bytes + HEADER_BYTES
        self._buffer.check(num_bytes)
        received: Future[ReceivedEmbedding] = Future()
        deadline = time.monotonic() + self.timeout_s
        self._requests.put(_Pending(Header.of(image), num_bytes, image.remote, deadline, received))
        return received

    def close(self) -> None:
        """Closes the connections, so that encoders do not keep them for an ended process."""
        self._requests.put(None)
        self._thread.join(self.timeout_s)

    def _run(self) -> None:
        while self._take_requests():
            self._pending = [pending for pending in self._pending if not self._advance(pending)]
            is_awaited = any(not pending.received.done() for pending in self._pending)
            time.sleep(POLL_S if is_awaited else ABANDONED_POLL_S if self._pending else 0)
        for pending in self._pending:
            _fail(pending, "the language model replica is shutting down")
        for agent_metadata in self._connected:
            self._rdma.disconnect(agent_metadata)
        self._rdma.close()

    def _take_requests(self) -> bool:
        """Takes new requests from the queue, and waits for one if no read is pending. Returns False after `close`."""
        while True:
            try:
                request = self._requests.get(block=not self._pending)
            except queue.Empty:
                return True
            if request is None:
                return False
            self._pending.append(request)

    def _advance(self, pending: _Pending) -> bool:
        """Starts or polls a read and returns whether it is over. An abandoned read is over only once nothing can be
        written into its memory any more."""
        try:
            try:
                if pending.read is None:
                    if pending.received.done():
                        return True
                    pending.memory = self._buffer.try_allocate(pending.num_bytes)
                    if pending.memory is not None:
                        self._connected.add(pending.source.agent_metadata)
                        self._read(pending, pending.memory, pending.num_bytes)
                elif pending.read() and self._complete(pending):
                    return True
            except ReadError:
                self._connected.discard(pending.source.agent_metadata)
                self._rdma.disconnect(pending.source.agent_metadata)
                raise
        except Exception as error:  # this thread must not die: later readers would wait for ever
            if not isinstance(error, ReadError | WrongEmbeddingError):
                logger.exception("an embedding could not be received")
            _fail(pending, str(error))
            return True
        if time.monotonic() >= pending.deadline:
            missing = "room" if pending.read is None else "bytes"
            _fail(pending, f"no {missing} for an embedding of {pending.num_bytes} bytes in {self.timeout_s} s")
        return False

    def _complete(self, pending: _Pending) -> bool:
        assert pending.memory is not None
        verify_header(pending.memory.array((HEADER_BYTES,)).data, pending.header)
        if pending.received.done():
            return True
        if not pending.is_body_read:  # the header may have changed while the bytes were read
            pending.is_body_read = True
            self._read(pending, pending.memory, HEADER_BYTES, notify=pending.source.lease)
            return False
        with contextlib.suppress(InvalidStateError):  # its reader cancelled it
            pending.received.set_result(ReceivedEmbedding(pending.memory, pending.header))
        return True

    def _read(self, pending: _Pending, memory: Allocation, num_bytes: int, *, notify: bytes = b"") -> None:
        agent, address = pending.source.agent_metadata, pending.source.address
        pending.read = self._rdma.read(agent, address, memory.offset, num_bytes, notify=notify)


def _fail(pending: _Pending, why: str) -> None:
    with contextlib.suppress(InvalidStateError):  # its reader cancelled it, or it failed before
        pending.received.set_exception(EmbeddingUnavailableError(why))
