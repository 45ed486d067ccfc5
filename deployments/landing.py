"""Memory beside a language model that embeddings on other hosts are read into: the reader's side.

One piece, registered once, which bounds what is in flight; what finds no room waits, for a bounded time. An embedding
counts as arrived when its header is right before and after its bytes were read. It must not know how bytes move, nor
what is done with embeddings.
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

from deployments.arena import Arena, Lease
from deployments.embedding_header import HEADER_BYTES, Header, WrongEmbeddingError, check
from deployments.lending import GoneError
from deployments.remote_memory import ReadError, Reading, RemoteMemory
from deployments.wire import RemotePlace, SharedEmbedding, tensor_of_bytes

logger = logging.getLogger("ray.serve")

PATIENCE_S = 5.0
"""For room and for the bytes together."""
STEP_S = 0.0002
"""Between looks at the reads under way."""
ABANDONED_STEP_S = 0.05
"""Where all that are left were given up."""


class Landed:
    """An embedding that was read. It stays until `release`, and until no tensor of it is left."""

    def __init__(self, lease: Lease) -> None:
        self._lease: Lease | None = lease
        self.start = lease.start
        """Where its header begins, in the landing's memory."""

    def tensor(self, start: int, header: Header) -> Tensor:
        """`[num_tokens, width]`. Raises WrongEmbeddingError."""
        if self._lease is None or start != self.start:
            raise WrongEmbeddingError("the embedding was given back")
        return _embedding(self._lease, header)

    def release(self, digest: str) -> None:
        self._lease = None


@dataclass
class _Pull:
    header: Header
    num_bytes: int
    place: RemotePlace
    until: float
    coming: Future[Landed]
    lease: Lease | None = None
    reading: Reading | None = None
    read_once: bool = False
    """All of it was read; what is read now is the header again."""


class Landing:
    """All that is read for one language model. May be asked on any thread; one of its own does the reading."""

    alive = True

    def __init__(
        self,
        memory: RemoteMemory,
        num_bytes: int,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = Arena(num_bytes, holds="landing")
        memory.register(self.arena.address, self.arena.num_bytes)
        self.address = f"landing-{secrets.token_hex(8)}"
        self.file, self.num_bytes = self.arena.file, self.arena.num_bytes
        self._memory, self.patience_s, self._clock = memory, patience_s, clock
        self._asked: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._pulls: list[_Pull] = []
        self._known: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="lands", daemon=True)
        self._thread.start()

    def fetch(self, image: SharedEmbedding) -> Future[Landed]:
        """Reads what an encoder of another host lends. The future raises GoneError."""
        if image.remote is None:
            raise ValueError("the embedding is lent on its own host")
        coming: Future[Landed] = Future()
        header = Header(image.digest, image.dtype, image.shape, image.grid_thw)
        num_bytes = HEADER_BYTES + image.num_bytes
        if num_bytes > self.num_bytes:
            coming.set_exception(GoneError(f"an embedding of {num_bytes} bytes, there is room for {self.num_bytes}"))
            return coming
        self._asked.put(_Pull(header, num_bytes, image.remote, self._clock() + self.patience_s, coming))
        return coming

    def close(self) -> None:
        """Ends the connections, so that encoders do not keep them for a process that has gone."""
        self._asked.put(None)
        self._thread.join(self.patience_s)

    def _run(self) -> None:
        while self._more():
            self._pulls = [pull for pull in self._pulls if not self._over(pull)]
            waited_for = any(not pull.coming.done() for pull in self._pulls)
            time.sleep(STEP_S if waited_for else ABANDONED_STEP_S if self._pulls else 0)
        for pull in self._pulls:
            _fail(pull, "the language model ends")
        for introduction in self._known:
            self._memory.forget(introduction)

    def _more(self) -> bool:
        """Takes over what was asked for, and waits where nothing is under way. False: the end."""
        while True:
            try:
                asked = self._asked.get(block=not self._pulls)
            except queue.Empty:
                return True
            if asked is None:
                return False
            self._pulls.append(asked)

    def _over(self, pull: _Pull) -> bool:
        """Goes one step on. What was given up stays until nothing can be written into its memory any more."""
        try:
            if pull.reading is None:
                if pull.coming.done():
                    return True
                self._begin(pull)
            elif pull.reading.ended() and self._whole(pull):
                return True
        except WrongEmbeddingError as error:
            _fail(pull, str(error))
            return True
        except ReadError as error:
            self._memory.forget(pull.place.introduction)
            self._known.discard(pull.place.introduction)
            _fail(pull, str(error))
            return True
        except Exception as error:  # this thread must not end: others would wait for it for ever
            logger.exception("a read from another host failed")
            _fail(pull, str(error))
            return True
        if self._clock() >= pull.until:
            missing = "room" if pull.reading is None else "bytes"
            _fail(pull, f"no {missing} for an embedding of {pull.num_bytes} bytes in {self.patience_s} s")
        return False

    def _begin(self, pull: _Pull) -> None:
        pull.lease = self.arena.take(pull.num_bytes)
        if pull.lease is not None:
            self._known.add(pull.place.introduction)
            self._read(pull, pull.num_bytes)

    def _whole(self, pull: _Pull) -> bool:
        assert pull.lease is not None
        _embedding(pull.lease, pull.header)
        if pull.coming.done():
            return True
        if not pull.read_once:  # as it was while it was read
            pull.read_once = True
            self._read(pull, HEADER_BYTES, told=pull.place.lease)
            return False
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            pull.coming.set_result(Landed(pull.lease))
        return True

    def _read(self, pull: _Pull, num_bytes: int, *, told: bytes = b"") -> None:
        assert pull.lease is not None
        place, target = pull.place, self.arena.address + pull.lease.start
        pull.reading = self._memory.read(place.introduction, place.address, target, num_bytes, told=told)


def _embedding(lease: Lease, header: Header) -> Tensor:
    """`[num_tokens, width]`, which keeps the lease. Raises WrongEmbeddingError."""
    rows, width = header.shape
    item = torch.float32 if header.dtype == "float32" else torch.bfloat16
    flat = torch.from_numpy(lease.array((HEADER_BYTES + rows * width * item.itemsize,)))
    check(flat[:HEADER_BYTES].numpy().tobytes(), header)
    return tensor_of_bytes(flat[HEADER_BYTES:], header.dtype, header.shape)


def _fail(pull: _Pull, why: str) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        pull.coming.set_exception(GoneError(why))
