"""The LLM replica's end of the link to its engine: grants leases, has workers map memory, and receives reports of loads
and of ended leases."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from deployments.transfer import unix_socket
from deployments.transfer.unix_socket import Sender
from deployments.vllm.connector.lease_table import EngineLease
from deployments.vllm.connector.link import (
    ENGINE_DECODER,
    MAX_LEASES,
    Connected,
    EngineMessage,
    Grant,
    LeasesEnded,
    Loaded,
    Map,
    Mapped,
    Missing,
    Release,
    Role,
    Unmap,
    send_if_connected,
)


@dataclass
class _OpenLease:
    num_loaded: int = 0
    num_planned: int | None = None
    """Total loads of all workers; None while the scheduler may plan more."""


class ReplicaLink:
    """The replica's end of the link. Thread-safe."""

    def __init__(
        self,
        num_workers: int,
        *,
        on_ended: Callable[[str], None],
        on_loaded: Callable[[Loaded], None],
        on_missing: Callable[[str, Sequence[str]], None],
    ) -> None:
        """`num_workers`: number of the engine's workers. `on_ended` receives each lease once nothing reads by it any
        more, `on_missing` a request and the digests of embeddings that it misses. All are called on the link's
        threads."""
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; an engine has at least 1")
        self._num_workers = num_workers
        self._on_ended, self._on_loaded, self._on_missing = on_ended, on_loaded, on_missing
        self._lock = threading.Condition()  # never held while blocking
        self._scheduler: Sender | None = None
        self._workers: list[Sender] = []
        self._was_connected = False
        self._pending_maps: dict[tuple[str, Sender], Future[None]] = {}
        self._open_leases: dict[str, _OpenLease] = {}
        self._listener = unix_socket.Listener(self._serve, name="engine-link")
        self.address = self._listener.address

    def wait_for_engine(self, *, timeout_s: float) -> bool:
        """Whether all engine processes are connected; waits for them up to `timeout_s`."""
        with self._lock:
            self._was_connected = self._lock.wait_for(self._is_connected, timeout_s)
            return self._was_connected

    def lost(self) -> str | None:
        """Returns why leases may no longer end, or memory can no longer be mapped; None if nothing is lost."""
        if not self._listener.is_alive:
            return "the thread that accepts the engine's connections has ended"
        with self._lock:
            return self._describe_connections() if self._was_connected and not self._is_connected() else None

    def map(self, server: str, file: int, num_bytes: int) -> list[Future[None]]:
        """Has every worker map a server's memory. Returns a future per worker, which raises RuntimeError or OSError if
        it fails. Raises OSError if not all workers are connected."""
        with self._lock:
            if len(self._workers) != self._num_workers:
                raise ConnectionError(self._describe_connections())
            futures: dict[Sender, Future[None]] = {worker: Future() for worker in self._workers}
            for worker, future in futures.items():
                future.set_running_or_notify_cancel()  # a cancelled future would refuse the result
                self._pending_maps[server, worker] = future
        for worker in futures:
            worker.send(Map(server, num_bytes), file)
        return list(futures.values())

    def unmap(self, server: str) -> None:
        with self._lock:
            workers = list(self._workers)
        for worker in workers:
            send_if_connected(worker, Unmap(server))

    def grant(self, lease: EngineLease) -> None:
        """Allows the engine to load by the lease until `release`. Raises OSError if the engine has ended."""
        scheduler = self._get_scheduler()
        with self._lock:
            self._open_leases[lease.name] = _OpenLease()
        scheduler.send(Grant(lease))

    def release(self, leases: Sequence[str]) -> None:
        """Releases leases whose request has ended. Raises OSError if the engine has ended."""
        scheduler = self._get_scheduler()
        for first in range(0, len(leases), MAX_LEASES):
            scheduler.send(Release(list(leases[first : first + MAX_LEASES])))

    def close(self) -> None:
        self._listener.close()

    def _is_connected(self) -> bool:
        return self._scheduler is not None and len(self._workers) == self._num_workers

    def _describe_connections(self) -> str:
        scheduler = "no scheduler" if self._scheduler is None else "the scheduler"
        workers = f"{len(self._workers)} of {self._num_workers} workers"
        return f"the engine's processes are not all connected: {scheduler}, {workers}"

    def _get_scheduler(self) -> Sender:
        with self._lock:
            if self._scheduler is None:
                raise ConnectionError("the engine has ended")
            return self._scheduler

    def _serve(self, connection: socket.socket) -> None:
        process = Sender(connection)
        try:
            unix_socket.handle_messages(connection, ENGINE_DECODER, partial(self._handle, process))
        finally:
            process.close()
            with self._lock:
                if process is self._scheduler:
                    self._scheduler = None
                if process in self._workers:
                    self._workers.remove(process)
                futures = [self._pending_maps.pop(key) for key in list(self._pending_maps) if key[1] is process]
            for future in futures:
                future.set_exception(ConnectionError("the engine has ended"))

    def _handle(self, process: Sender, message: EngineMessage, file: int | None) -> None:
        if file is not None:
            os.close(file)  # the engine shares no files
        match message:
            case Connected(role):
                with self._lock:
                    if role is Role.SCHEDULER:
                        self._scheduler = process
                    else:
                        self._workers.append(process)
                    self._lock.notify_all()
            case Mapped(server, error):
                with self._lock:
                    future = self._pending_maps.pop((server, process))
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(RuntimeError(error))
            case LeasesEnded(leases):
                for lease in leases:
                    with self._lock:
                        self._open_leases[lease.name].num_planned = lease.num_planned * self._num_workers
                    self._end_if_loaded(lease.name)
            case Missing(request, digests):
                self._on_missing(request, digests)
            case Loaded(name):
                with self._lock:
                    self._open_leases[name].num_loaded += 1
                self._end_if_loaded(name)
                self._on_loaded(message)

    def _end_if_loaded(self, name: str) -> None:
        with self._lock:
            lease = self._open_leases.get(name)
            if lease is None or lease.num_planned is None or lease.num_loaded < lease.num_planned:
                return
            del self._open_leases[name]
        self._on_ended(name)
