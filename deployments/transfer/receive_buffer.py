"""Receive buffer of an LLM replica, for embeddings that its engine cannot load from the encoder's memory: those read
from other hosts by RDMA, and those received by value. One region caps the bytes in flight; a transfer that does not fit
waits for space, up to `timeout_s`.

The header is verified together with the bytes and once more after them: the memory may be reused during a read.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.common.messages import RemoteLocation, SharedEmbedding
from deployments.transfer.header import HEADER_BYTES, Header, WrongEmbeddingError, embedding_view
from deployments.transfer.rdma import NixlMemory, NixlRead, ReadError
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_memory import Allocation, Arena
from deployments.transfer.unix_socket import ListenerError, OnError

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
"""Time limit of a transfer, including the wait for space."""
POLL_S = 0.0002
"""Pause between polls of the reads in flight."""
ABANDONED_POLL_S = 0.05
"""Pause between polls if all reads in flight were abandoned."""


class ReceivedEmbedding:
    """`same_host.EmbeddingLease` on an embedding in the buffer. After `release`, its memory is freed with its last
    tensor."""

    def __init__(self, memory: Allocation, header: Header) -> None:
        self._memory: Allocation | None = memory
        self.header = header
        self.offset = memory.offset
        """Offset of the header in the buffer, in bytes."""

    def tensor(self) -> Tensor:
        """Returns the embedding `[num_tokens, width]`, which keeps the memory. Raises WrongEmbeddingError, also after
        `release`."""
        if self._memory is None:
            raise WrongEmbeddingError("the embedding was released")
        return _view(self._memory, self.header)

    def release(self) -> None:
        self._memory = None


@dataclass
class _Pending:
    header: Header
    num_bytes: int
    source: RemoteLocation | Tensor
    """Location on another host, or the embedding itself, `[num_tokens, width]` in host memory."""
    deadline: float
    received: Future[ReceivedEmbedding]
    memory: Allocation | None = None
    read: NixlRead | None = None
    is_body_read: bool = False
    """All bytes were read; the header is being read again."""


class ReceiveBuffer:
    """All RDMA reads and copies of one LLM replica. Thread-safe; its own thread copies, and starts and polls the reads.

    buffer = ReceiveBuffer(None, num_bytes)
    received = buffer.store(Header.of(image), image.unpack()).result()
    received.release()
    """

    def __init__(
        self,
        memory: NixlMemory | None,
        num_bytes: int,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = lambda _: None,
    ) -> None:
        """`memory`: RDMA endpoint, None without reads from other hosts. `on_error` is called on the reading thread when
        it survived an error."""
        self.arena = Arena(num_bytes, purpose="received")
        if memory is not None:
            memory.register(self.arena.address, self.arena.num_bytes)
        self.address = f"receive-buffer-{secrets.token_hex(8)}"
        self.file, self.num_bytes = self.arena.file, self.arena.num_bytes
        self._memory, self.timeout_s, self._clock, self._on_error = memory, timeout_s, clock, on_error
        self._requests: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._pending: list[_Pending] = []
        self._connected: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="receive-buffer", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the reading thread is running."""
        return self._thread.is_alive()

    @property
    def reads_remotely(self) -> bool:
        """Whether encoders on other hosts can be read from."""
        return self._memory is not None

    def receive(self, image: SharedEmbedding) -> Future[ReceivedEmbedding]:
        """Reads an embedding that an encoder published for other hosts. The future raises EmbeddingUnavailableError.

        Raises ValueError for an embedding without a remote location.
        """
        if image.remote is None:
            raise ValueError("the embedding was not published for RDMA")
        return self._submit(Header.of(image), image.num_bytes, image.remote)

    def store(self, header: Header, embedding: Tensor) -> Future[ReceivedEmbedding]:
        """Copies an embedding, `[num_tokens, width]` in host memory. The future raises EmbeddingUnavailableError."""
        return self._submit(header, embedding.nbytes, embedding)

    def _submit(self, header: Header, num_bytes: int, source: RemoteLocation | Tensor) -> Future[ReceivedEmbedding]:
        received: Future[ReceivedEmbedding] = Future()
        num_bytes += HEADER_BYTES
        if num_bytes > self.num_bytes:
            error = f"an embedding of {num_bytes} bytes does not fit the buffer of {self.num_bytes}"
            received.set_exception(EmbeddingUnavailableError(error))
        elif self._memory is None and isinstance(source, RemoteLocation):
            error = "this language model replica does not read embeddings from other hosts"
            received.set_exception(EmbeddingUnavailableError(error))
        else:
            deadline = self._clock() + self.timeout_s
            self._requests.put(_Pending(header, num_bytes, source, deadline, received))
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
            self._get_memory().disconnect(agent_metadata)

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
                    if pending.received.done() or self._start(pending):
                        return True
                elif pending.read.done() and self._complete(pending):
                    return True
            except ReadError as error:
                assert isinstance(pending.source, RemoteLocation)
                self._connected.discard(pending.source.agent_metadata)
                self._get_memory().disconnect(pending.source.agent_metadata)
                _fail(pending, str(error))
                return True
        except WrongEmbeddingError as error:
            _fail(pending, str(error))
            return True
        except Exception as error:  # this thread must not die: later readers would wait for ever
            logger.exception("an embedding could not be received")
            self._on_error(ListenerError.MESSAGE)
            _fail(pending, str(error))
            return True
        if self._clock() >= pending.deadline:
            missing = "room" if pending.read is None else "bytes"
            _fail(pending, f"no {missing} for an embedding of {pending.num_bytes} bytes in {self.timeout_s} s")
        return False

    def _start(self, pending: _Pending) -> bool:
        """Copies the embedding or starts its read, if there is space. Returns whether the transfer is over."""
        pending.memory = self.arena.allocate(pending.num_bytes)
        if pending.memory is None:
            return False
        if isinstance(pending.source, RemoteLocation):
            self._connected.add(pending.source.agent_metadata)
            self._read(pending.source, pending, pending.num_bytes)
            return False
        self.arena.write(pending.memory.offset, pending.header.to_bytes())
        _view(pending.memory, pending.header).copy_(pending.source)
        _succeed(pending)
        return True

    def _complete(self, pending: _Pending) -> bool:
        assert pending.memory is not None
        assert isinstance(pending.source, RemoteLocation)
        _view(pending.memory, pending.header)
        if pending.received.done():
            return True
        if not pending.is_body_read:  # the header may have changed while the bytes were read
            pending.is_body_read = True
            self._read(pending.source, pending, HEADER_BYTES, notify=pending.source.lease)
            return False
        _succeed(pending)
        return True

    def _read(self, location: RemoteLocation, pending: _Pending, num_bytes: int, *, notify: bytes = b"") -> None:
        assert pending.memory is not None
        memory, target = self._get_memory(), self.arena.address + pending.memory.offset
        pending.read = memory.read(location.agent_metadata, location.address, target, num_bytes, notify=notify)

    def _get_memory(self) -> NixlMemory:
        assert self._memory is not None, "`_submit` refuses reads from other hosts without it"
        return self._memory


def _view(memory: Allocation, header: Header) -> Tensor:
    """Returns the embedding `[num_tokens, width]`, which keeps the memory. Raises WrongEmbeddingError."""
    return embedding_view(torch.from_numpy(memory.array((memory.num_bytes,))), header)


def _succeed(pending: _Pending) -> None:
    assert pending.memory is not None
    with contextlib.suppress(InvalidStateError):  # its reader cancelled it
        pending.received.set_result(ReceivedEmbedding(pending.memory, pending.header))


def _fail(pending: _Pending, why: str) -> None:
    with contextlib.suppress(InvalidStateError):  # its reader cancelled it, or it failed before
        pending.received.set_exception(EmbeddingUnavailableError(why))
