"""NIXL in a child process: a failed assertion of UCX ends that process, which costs reads in flight instead of the
replica. It is started again; meanwhile embeddings are read by TCP or from shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

from deployments.common.child_process import spawn
from deployments.transfer.rdma import NixlMemory, NixlRead, NotInstalledError, ReadError
from deployments.transfer.shared_memory import Arena

logger = logging.getLogger("ray.serve")

START_TIMEOUT_S = 120.0
"""Timeout of a start: NIXL connects to all network cards and registers the memory."""
CALL_TIMEOUT_S = 5.0
"""A process that has not answered a call by then is ended."""
RESTART_PAUSE_S = 1.0
"""Pause before a process that has ended is started again. It doubles each time up to the next constant, until a process
has lived that long."""
MAX_RESTART_PAUSE_S = 60.0

ENDED = "the RDMA process ended and is restarting"


@dataclass(frozen=True)
class Endpoint:
    """The address by which other processes read an arena."""

    agent_metadata: bytes
    address: int
    """Address of the arena in the RDMA process."""


Read = Callable[[], bool]
"""A read in flight: returns whether all bytes have arrived, and must be called until they have. Raises ReadError; after
the end of its process, nothing is written any more."""


def serve(pipe: connection.Connection, arena: mmap.mmap, make_memory: Callable[[], NixlMemory] = NixlMemory) -> None:
    """Runs in the child, which has the parent's arena as a map: sends the endpoint or the error of its start, then
    answers calls until the pipe closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
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
        read = reads.pop(number)
        if is_done := read.done():
            return is_done
        reads[number] = read
        return False

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
        except Exception as error:
            answer = error if isinstance(error, ReadError) else ReadError(repr(error))
        pipe.send(answer)


def _end_with_parent() -> None:
    """A call that does not return must not keep the arena of a replica that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class RdmaProcess:
    """RDMA endpoint of one arena, in a child process. `endpoint` may be called on any thread, the others on one.

    rdma = RdmaProcess()
    rdma.start(arena)
    read = rdma.read(agent_metadata, source, offset, num_bytes)
    while not read(): ...
    """

    def __init__(
        self,
        *,
        run: Callable[..., None] = serve,
        on_restarted: Callable[[], None] = lambda: None,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`run` is executed in the child. `on_restarted` is called on another thread."""
        self._run, self._on_restarted, self._call_timeout_s = run, on_restarted, call_timeout_s
        self._lock = threading.Lock()  # for `_child`
        self._child: _Child | None = None
        self._closed = threading.Event()
        self._pause_s = 0.0
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
        return partial(self._call, child, "done", self._num_reads)

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
            self._closed.set()
            child = self._child
        if child is not None:
            child.end()

    def _call(self, child: _Child, name: str, *arguments: object) -> Any:  # noqa: ANN401 - by name
        try:
            answer = child.call(self._call_timeout_s, name, *arguments)
        except (EOFError, OSError) as error:  # a TimeoutError is an OSError
            child.end()  # nothing is written into the arena any more
            self._running()
            raise ReadError(ENDED) from error
        if isinstance(answer, ReadError):
            raise answer
        return answer

    def _running(self) -> _Child | None:
        """Returns the process. If it has ended, begins to start another one and returns None."""
        with self._lock:
            child = self._child
            if child is None or child.is_alive:
                return child
            threading.Thread(target=self._start_again, args=(child,), name="rdma-start", daemon=True).start()
            self._child = None
            return None

    def _start_again(self, ended: _Child) -> None:
        if not self._closed.is_set():
            logger.error("the RDMA process ended with exit code %s and is restarting", ended.end())
        if time.monotonic() - ended.started_at_s > MAX_RESTART_PAUSE_S:
            self._pause_s = 0.0
        while not self._closed.wait(self._next_pause_s()):
            try:
                child = _Child(self._arena, self._run)
            except Exception:
                logger.exception("the RDMA process does not start")
                continue
            with self._lock:
                if not self._closed.is_set():
                    self._child = child
            if self._closed.is_set():
                child.end()
            else:
                self._on_restarted()
            return

    def _next_pause_s(self) -> float:
        self._pause_s = min(2 * self._pause_s, MAX_RESTART_PAUSE_S) or RESTART_PAUSE_S
        return self._pause_s


class _Child:
    """One process."""

    def __init__(self, arena: Arena, run: Callable[..., None]) -> None:
        """Raises NotInstalledError, or OSError if the system cannot start a process."""
        self._pipe, self._process = spawn(run, arena, name="rdma")
        late = NotInstalledError(f"NIXL does not start in {START_TIMEOUT_S:g} s")
        try:
            started = self._pipe.recv() if self._pipe.poll(START_TIMEOUT_S) else late
        except (EOFError, OSError):
            started = NotInstalledError("NIXL does not start: its process ended")
        if isinstance(started, NotInstalledError):
            self.end()
            raise started
        self.endpoint: Endpoint = started
        self.started_at_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        return not connection.wait([self._process.sentinel], 0)

    def call(self, timeout_s: float, name: str, *arguments: object) -> Any:  # noqa: ANN401 - by name
        """Raises EOFError or OSError if the process has ended, TimeoutError if it does not answer."""
        self._pipe.send((name, *arguments))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return self._pipe.recv()

    def end(self) -> int | None:
        """Kills the process if it is running. Returns its exit code."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode
