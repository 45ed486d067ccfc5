"""NIXL in a child process: a failed assertion of UCX ends that process, which costs reads in flight instead of the
replica. It is started again; meanwhile embeddings are read by TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Protocol

from deployments.transfer.rdma import NixlMemory, NixlRead, NotInstalledError, ReadError
from deployments.transfer.shared_memory import Arena, ArenaHandle

logger = logging.getLogger("ray.serve")

START_TIMEOUT_S = 120.0
"""Timeout of a start: NIXL connects to all network cards and registers the memory."""
CALL_TIMEOUT_S = 5.0
"""A process that has not answered a call by then is ended."""
RESTART_PAUSE_S = 1.0
"""Pause before a process that has ended is started again."""

ENDED = "the process that reads by RDMA has ended and is started again"


@dataclass(frozen=True)
class Endpoint:
    """What other processes need to read an arena."""

    agent_metadata: bytes
    address: int
    """Address of the arena in the RDMA process."""


class Read(Protocol):
    """A read in flight."""

    def done(self) -> bool:
        """Whether all bytes have arrived; must be polled until they have. Raises ReadError."""
        ...


def serve(pipe: connection.Connection, handle: ArenaHandle, make_memory: Callable[[], NixlMemory] = NixlMemory) -> None:
    """Runs in the child: sends the endpoint or the error of its start, then answers calls until the pipe closes."""
    arena = handle.open()
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    try:
        memory = make_memory()
        memory.register(address, len(arena))
    except NotInstalledError as error:
        pipe.send(error)
        return
    pipe.send(Endpoint(memory.get_agent_metadata(), address))
    reads: dict[int, NixlRead] = {}

    def read(number: int, metadata: bytes, source: int, offset: int, num_bytes: int, notify: bytes) -> None:
        reads[number] = memory.read(metadata, source, address + offset, num_bytes, notify=notify)

    def done(number: int) -> bool:
        try:
            is_done = reads[number].done()
        except ReadError:
            del reads[number]
            raise
        if is_done:
            del reads[number]
        return is_done

    calls: dict[str, Callable[..., Any]] = {
        "read": read, "done": done, "disconnect": memory.disconnect, "get_notifications": memory.get_notifications
    }  # fmt: skip
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = calls[name](*arguments)
        except ReadError as error:
            answer = error
        pipe.send(answer)


class RdmaProcess:
    """RDMA endpoint of one arena, in a child process. `endpoint` may be called on any thread, the others on one.

    rdma = RdmaProcess()
    rdma.start(arena)
    read = rdma.read(agent_metadata, source, offset, num_bytes)
    while not read.done(): ...
    """

    def __init__(
        self,
        *,
        run: Callable[..., None] = serve,
        on_ended: Callable[[], None] = lambda: None,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`run` is executed in the child. `on_ended` is called when a process has ended, before the next one starts."""
        self._run, self._on_ended, self._call_timeout_s = run, on_ended, call_timeout_s
        self._lock = threading.Lock()  # for the three fields below
        self._child: _Child | None = None
        self._is_starting = self._is_closed = False
        self._num_reads = 0

    def start(self, arena: Arena) -> None:
        """Registers an arena that others read, or that reads write to. Raises NotInstalledError if NIXL cannot be
        used."""
        self._arena, self._child = arena, _Child(arena, self._run)

    def endpoint(self) -> Endpoint | None:
        """Returns None while there is no process."""
        child = self._running()
        return None if child is None else child.endpoint

    def read(self, agent_metadata: bytes, source: int, offset: int, num_bytes: int, *, notify: bytes = b"") -> Read:
        """Starts a read from address `source` of another endpoint to `offset` of the arena. The other process receives
        `notify` when the read is done. Raises ReadError."""
        self._num_reads += 1
        child = self._running()
        if child is None:
            raise ReadError(ENDED)
        self._call(child, "read", self._num_reads, agent_metadata, source, offset, num_bytes, notify)
        return _ProcessRead(self, child, self._num_reads)

    def disconnect(self, agent_metadata: bytes) -> None:
        """Closes the connection; a later read opens a new one."""
        child = self._running()
        if child is not None:
            with contextlib.suppress(ReadError):
                self._call(child, "disconnect", agent_metadata)

    def get_notifications(self) -> list[bytes]:
        """Returns readers' notifications. Must be polled often during reads: on some networks that moves the bytes.
        Raises ReadError."""
        child = self._running()
        notifications: list[bytes] = [] if child is None else self._call(child, "get_notifications")
        return notifications

    def close(self) -> None:
        """Ends the process for good."""
        with self._lock:
            self._is_closed, child = True, self._child
        if child is not None:
            child.end()

    def _call(self, child: _Child, name: str, *arguments: object) -> Any:  # noqa: ANN401 - by name
        try:
            answer = child.call(self._call_timeout_s, name, *arguments)
        except (EOFError, OSError) as error:  # a TimeoutError is an OSError
            child.end()
            self._running()
            raise ReadError(ENDED) from error
        if isinstance(answer, ReadError):
            raise answer
        return answer

    def _running(self) -> _Child | None:
        """Returns the process. If it has ended, begins to start another one and returns None."""
        with self._lock:
            if self._child is not None and self._child.is_alive:
                return self._child
            if self._child is not None:
                self._child.end()  # reaps it
                self._child = None
            if self._is_starting or self._is_closed:
                return None
            self._is_starting = True
        threading.Thread(target=self._start_again, name="rdma-start", daemon=True).start()
        return None

    def _start_again(self) -> None:
        logger.error(ENDED)
        self._on_ended()
        time.sleep(RESTART_PAUSE_S)
        child = None
        try:
            child = _Child(self._arena, self._run)
        except (NotInstalledError, OSError):
            logger.exception("the process that reads by RDMA cannot be started")
        with self._lock:
            self._child, self._is_starting = child, False
            is_closed = self._is_closed
        if is_closed and child is not None:
            child.end()


class _ProcessRead:
    def __init__(self, process: RdmaProcess, child: _Child, number: int) -> None:
        self._process, self._child, self._number = process, child, number

    def done(self) -> bool:
        """See `Read`. After the end of its process, nothing is written any more."""
        return bool(self._process._call(self._child, "done", self._number))  # noqa: SLF001


class _Child:
    """One process."""

    def __init__(self, arena: Arena, run: Callable[..., None]) -> None:
        """Raises NotInstalledError, or OSError if the system has no process left."""
        self._pipe, theirs = multiprocessing.Pipe()
        # Forking a process that uses CUDA or threads is not safe.
        self._process = multiprocessing.get_context("spawn").Process(
            target=run, args=(theirs, arena.handle()), name="rdma", daemon=True
        )
        try:
            self._process.start()
        finally:
            theirs.close()  # or reading would not raise EOFError when the process ends
        try:
            if not self._pipe.poll(START_TIMEOUT_S):
                raise NotInstalledError(f"NIXL does not start in {START_TIMEOUT_S:g} s")
            started = self._pipe.recv()
        except EOFError:
            started = NotInstalledError("NIXL does not start: its process ended")
        if isinstance(started, NotInstalledError):
            self.end()
            raise started
        self.endpoint: Endpoint = started

    @property
    def is_alive(self) -> bool:
        return not connection.wait([self._process.sentinel], 0)

    def call(self, timeout_s: float, name: str, *arguments: object) -> Any:  # noqa: ANN401 - by name
        """Raises EOFError, or OSError with TimeoutError if the process is gone or silent."""
        self._pipe.send((name, *arguments))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
