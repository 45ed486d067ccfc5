"""Embeddings lent to other processes of the host: the lender beside an encoder, the borrower beside a language model.

A borrower gets the whole memory once, as a file, and then for each embedding the place where it lies. What it holds
stays there until it gives it back or its process is gone. It must not know what is done with embeddings.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deployments import packets
from deployments.embedding_header import HEADER_BYTES, Header, check
from deployments.embedding_shelf import Bits, EmbeddingShelf
from deployments.wire import SharedEmbedding, tensor_of_bytes

logger = logging.getLogger("ray.serve")

PATIENCE_S = 5.0


class GoneError(RuntimeError):
    """The embedding cannot be had from where it was said to lie. The encoder may be asked again."""


class Lender:
    """Lends from a shelf, on threads of its own, until it is closed."""

    def __init__(self, shelf: EmbeddingShelf, *, unasked: Callable[[str], None] = lambda digest: None) -> None:
        """`unasked` is told, on some thread, the digest of what a borrower knew to be here and has got: no encoder was
        asked."""
        self.shelf = shelf
        self._unasked = unasked
        self._listening, self.address = packets.listen()
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="lender", daemon=True).start()

    def close(self) -> None:
        packets.close(self._listening)
        for connection in list(self._connections):
            packets.close(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection = packets.accept(self._listening)
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="lends", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        held: dict[str, list[Bits]] = {}
        try:
            packets.send(connection, {"num_bytes": self.shelf.arena.num_bytes}, self.shelf.arena.file)
            while (came := packets.receive(connection)) is not None:
                if "hold" in came[0]:
                    digest = came[0]["hold"]
                    start = self._lend(digest, held)
                    packets.send(connection, {"start": start})
                    if start is not None and came[0].get("unasked"):
                        self._unasked(digest)
                else:
                    _take_back(came[0]["release"], held)
        except (OSError, ValueError, KeyError):
            logger.debug("a borrower has gone", exc_info=True)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _lend(self, digest: str, held: dict[str, list[Bits]]) -> int | None:
        lent = self.shelf.lend(digest)
        if lent is None:
            return None
        held.setdefault(digest, []).append(lent[1])
        return lent[0]


def _take_back(digest: str, held: dict[str, list[Bits]]) -> None:
    kept = held.get(digest, [])
    if kept:
        kept.pop()
    if not kept:
        held.pop(digest, None)


class Borrowed:
    """All that one lender may lend, mapped here. Usable after the lender's end too, for what was held by then."""

    def __init__(self, address: str) -> None:
        """Raises GoneError where there is no lender."""
        self.address = address
        try:
            self._connection = packets.connect(address, timeout_s=PATIENCE_S)
            came = packets.receive(self._connection)
            if came is None or came[1] is None:
                raise ConnectionError("the lender closed the connection")
            self._connection.settimeout(None)
        except OSError as error:
            raise GoneError(f"no lender of embeddings answers: {error}") from error
        packet, self.file = came[0], came[1]
        self.num_bytes = int(packet["num_bytes"])
        # Not read-only: CUDA pins no memory that a process may not write to.
        self.memory = mmap.mmap(self.file, self.num_bytes)
        self._flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._asked: deque[Future[int]] = deque()
        self.alive = True
        threading.Thread(target=self._listen, name="borrower", daemon=True).start()

    def hold(self, digest: str, *, unasked: bool = False) -> Future[int]:
        """Where the embedding's header begins. The future raises GoneError.

        `unasked`: it is known from before to be there, and no encoder was asked for it now.
        """
        place: Future[int] = Future()
        with self._lock:  # answers come in the order of the questions
            if not self.alive:
                place.set_exception(GoneError("the lender has gone"))
                return place
            self._asked.append(place)
            self._tell({"hold": digest, "unasked": unasked})
        return place

    def release(self, digest: str) -> None:
        with self._lock:
            self._tell({"release": digest})

    def tensor(self, start: int, header: Header) -> Tensor:
        """The embedding, sharing memory with the lender's. Raises WrongEmbeddingError."""
        begin = start + HEADER_BYTES
        check(memoryview(self.memory)[start:begin], header)
        item = torch.float32 if header.dtype == "float32" else torch.bfloat16
        num_bytes = header.shape[0] * header.shape[1] * item.itemsize
        return tensor_of_bytes(self._flat[begin : begin + num_bytes], header.dtype, header.shape)

    def close(self) -> None:
        """Gives everything back."""
        packets.close(self._connection)

    def _tell(self, packet: packets.Packet) -> None:
        try:
            packets.send(self._connection, packet)
        except OSError:
            logger.debug("the lender has gone", exc_info=True)  # `_listen` sees it too, and answers who waits

    def _listen(self) -> None:
        try:
            while (came := packets.receive(self._connection)) is not None:
                start = came[0]["start"]
                place = self._asked.popleft()
                if start is None:
                    place.set_exception(GoneError("the encoder does not have the embedding any more"))
                else:
                    place.set_result(int(start))
        except OSError:
            logger.debug("the lender has gone", exc_info=True)
        finally:
            with self._lock:
                self.alive = False
                left = list(self._asked)
                self._asked.clear()
            for place in left:
                place.set_exception(GoneError("the lender has gone"))
            self._connection.close()

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)


class Keeper(Protocol):
    """Whoever lets an embedding be read here."""

    def tensor(self, start: int, header: Header) -> Tensor: ...

    def release(self, digest: str) -> None: ...


@dataclass(frozen=True)
class Held:
    """An embedding that stays where it is until `release`."""

    image: SharedEmbedding
    borrowed: Keeper
    start: int

    @property
    def header(self) -> Header:
        return Header(self.image.digest, self.image.dtype, self.image.shape, self.image.grid_thw)

    def tensor(self) -> Tensor:
        """The embedding `[num_tokens, width]`, sharing memory with the encoder's. Raises WrongEmbeddingError."""
        return self.borrowed.tensor(self.start, self.header)

    def release(self) -> None:
        self.borrowed.release(self.image.digest)
