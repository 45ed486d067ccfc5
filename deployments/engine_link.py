"""The language model replica's line to the processes of its engine: what they may load, and what has come of it.

The scheduler's process and each worker connect once, when vLLM makes its connectors. It must not know of vLLM, nor how
embeddings are borrowed.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from deployments import packets
from deployments.embedding_header import Header
from deployments.engine_memory import EngineMemory
from deployments.engine_table import Ended, EngineTable, Place

logger = logging.getLogger("ray.serve")

SCHEDULER, WORKER = "scheduler", "worker"
ADDRESS_KEY = "vitray_link"
"""Of vLLM's `ec_connector_extra_config`: where its connectors call."""
LEAST_TOKENS_KEY = "vitray_least_tokens"
"""Likewise: from how many tokens on a prompt is read before all of its embeddings are there."""
MAP_PATIENCE_S = 60.0
"""For a worker to map and pin an encoder's memory, which is some GiB."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An embedding that a worker has on its device."""

    lease: str
    num_bytes: int
    """0 where it had it already."""
    seconds: float
    """Since it was computed."""


@dataclasses.dataclass
class _Open:
    """What is still to be heard of a lease."""

    num_loaded: int = 0
    num_due: int | None = None


class EngineLink:
    """The replica's end."""

    def __init__(
        self, *, ended: Callable[[str], None], loaded: Callable[[Loaded], None], missing: Callable[[str], None]
    ) -> None:
        """`ended` is told a lease once nothing reads by it any more, `loaded` what was copied, `missing` the digest of
        what the scheduler waits for; on other threads."""
        self._ended, self._loaded, self._missing = ended, loaded, missing
        self._listening, self.address = packets.listen()
        self._lock = threading.Condition()
        self._scheduler: socket.socket | None = None
        self._workers: list[socket.socket] = []
        self._mapping: dict[tuple[str, socket.socket], Future[None]] = {}
        self._open: dict[str, _Open] = {}
        threading.Thread(target=self._accept, name="engine-link", daemon=True).start()

    def connected(self, num_workers: int, *, timeout_s: float) -> bool:
        """Whether the engine can load anything; waits for what has been started already."""
        with self._lock:
            return self._lock.wait_for(
                lambda: self._scheduler is not None and len(self._workers) == num_workers, timeout_s
            )

    def map(self, lender: str, file: int, num_bytes: int) -> list[Future[None]]:
        """Has every worker map a lender's memory; one future each, which may raise."""
        with self._lock:
            futures: list[Future[None]] = []
            for worker in self._workers:
                future: Future[None] = Future()
                self._mapping[lender, worker] = future
                futures.append(future)
                packets.send(worker, {"map": lender, "num_bytes": num_bytes}, file)
            return futures

    def forget(self, lender: str) -> None:
        with self._lock:
            for worker in self._workers:
                packets.send(worker, {"forget": lender})

    def give(self, place: Place) -> None:
        """A lease, until `withdraw`. Raises OSError where the engine has gone."""
        with self._lock:
            self._open[place.lease] = _Open()
            self._tell({"give": dataclasses.asdict(place)})

    def withdraw(self, lease: str) -> None:
        """Its request has ended. Raises OSError where the engine has gone."""
        with self._lock:
            self._tell({"withdraw": lease})

    def close(self) -> None:
        packets.close(self._listening)
        with self._lock:
            ends = [*self._workers, *([self._scheduler] if self._scheduler else [])]
        for end in ends:
            packets.close(end)

    def _tell(self, packet: packets.Packet) -> None:
        if self._scheduler is None:
            raise ConnectionError("the engine has gone")
        packets.send(self._scheduler, packet)

    def _accept(self) -> None:
        while True:
            try:
                connection = packets.accept(self._listening)
            except OSError:
                return
            threading.Thread(target=self._listen, args=(connection,), name="engine-link", daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        try:
            while (came := packets.receive(connection)) is not None:
                self._hear(connection, came[0])
        except OSError:
            logger.debug("the engine has gone", exc_info=True)
        finally:
            with self._lock:
                if connection is self._scheduler:
                    self._scheduler = None
                if connection in self._workers:
                    self._workers.remove(connection)
                lost = [key for key in self._mapping if key[1] is connection]
                futures = [self._mapping.pop(key) for key in lost]
            for future in futures:
                future.set_exception(ConnectionError("the engine has gone"))
            connection.close()

    def _hear(self, connection: socket.socket, packet: packets.Packet) -> None:
        if "role" in packet:
            with self._lock:
                if packet["role"] == SCHEDULER:
                    self._scheduler = connection
                else:
                    self._workers.append(connection)
                self._lock.notify_all()
        elif "mapped" in packet:
            with self._lock:
                future = self._mapping.pop((packet["mapped"], connection))
            if packet["error"] is None:
                future.set_result(None)
            else:
                future.set_exception(RuntimeError(packet["error"]))
        elif "ended" in packet:
            with self._lock:
                self._open[packet["ended"]].num_due = packet["num_loads"] * len(self._workers)
            self._closed(packet["ended"])
        elif "missing" in packet:
            self._missing(packet["missing"])
        elif "loaded" in packet:
            loaded = Loaded(packet["loaded"], packet["num_bytes"], packet["seconds"])
            with self._lock:
                self._open[loaded.lease].num_loaded += 1
            self._loaded(loaded)
            self._closed(loaded.lease)

    def _closed(self, lease: str) -> None:
        with self._lock:
            state = self._open.get(lease)
            if state is None or state.num_due is None or state.num_loaded < state.num_due:
                return
            del self._open[lease]
        self._ended(lease)


class SchedulerEnd:
    """The end beside vLLM's scheduler: keeps the table up to date, and tells which leases have ended."""

    def __init__(self, address: str) -> None:
        self.table = EngineTable()
        self._missed: dict[str, set[str]] = {}
        self._connection = _connect(address, SCHEDULER)
        threading.Thread(target=self._listen, name="engine-link", daemon=True).start()

    def available(self, request: str, digests: Sequence[str]) -> int:
        """How many of them, from the first on, can be loaded; what cannot is told, once for each request."""
        num_there = self.table.available(request, digests)
        if num_there < len(digests):
            missed = self._missed.setdefault(request, set())
            for digest in digests[num_there:]:
                if digest not in missed and not self.table.has(digest):
                    missed.add(digest)
                    _send_while_there(self._connection, {"missing": digest})
        return num_there

    def finished(self, request: str) -> None:
        self._missed.pop(request, None)
        self._tell(self.table.finished(request))

    def close(self) -> None:
        packets.close(self._connection)

    def _tell(self, leases: list[Ended]) -> None:
        for ended in leases:
            _send_while_there(self._connection, {"ended": ended.lease, "num_loads": ended.num_loads})

    def _listen(self) -> None:
        for packet, _ in _packets(self._connection):
            if "give" in packet:
                self.table.give(place_of(packet["give"]))
            elif "withdraw" in packet:
                self._tell(self.table.withdraw(packet["withdraw"]))


class WorkerEnd:
    """The end in a worker process: maps what it is told to."""

    def __init__(self, address: str, memory: EngineMemory) -> None:
        self._memory = memory
        self._connection = _connect(address, WORKER)
        threading.Thread(target=self._listen, name="engine-link", daemon=True).start()

    def loaded(self, loaded: Loaded) -> None:
        packet = {"loaded": loaded.lease, "num_bytes": loaded.num_bytes, "seconds": loaded.seconds}
        _send_while_there(self._connection, packet)

    def close(self) -> None:
        packets.close(self._connection)

    def _listen(self) -> None:
        for packet, file in _packets(self._connection):
            if "map" in packet:
                error = None
                try:
                    if file is None:
                        raise OSError("no file came with the message")
                    self._memory.map(packet["map"], file, packet["num_bytes"])
                except (OSError, RuntimeError, ValueError) as failed:
                    error = str(failed)
                _send_while_there(self._connection, {"mapped": packet["map"], "error": error})
            elif "forget" in packet:
                self._memory.forget(packet["forget"])


def place_of(written: packets.Packet) -> Place:
    header = written["header"]
    shape, grid = tuple(header["shape"]), tuple(header["grid_thw"])
    return Place(
        written["lease"],
        written["lender"],
        written["start"],
        Header(header["digest"], header["dtype"], shape, grid),
        written["ready_at_s"],
    )


def _connect(address: str, role: str) -> socket.socket:
    connection = packets.connect(address, timeout_s=MAP_PATIENCE_S)
    connection.settimeout(None)
    packets.send(connection, {"role": role})
    return connection


def _packets(connection: socket.socket) -> Iterator[tuple[packets.Packet, int | None]]:
    """Until the replica has gone, which ends its engine by other means."""
    try:
        while (came := packets.receive(connection)) is not None:
            yield came
    except OSError:
        logger.debug("the replica has gone", exc_info=True)


def _send_while_there(connection: socket.socket, packet: packets.Packet) -> None:
    try:
        packets.send(connection, packet)
    except OSError:
        logger.debug("the replica has gone", exc_info=True)
