"""Shared memory for what processes hand to one another: one bounded piece without a name, handed out in leases.

Decoder processes leave pixels in one, embeddings wait in another for language models. The memory is an anonymous file
that other processes are given, so nothing lies in /dev/shm and the kernel takes it back when the last process that
holds it is gone, however it died. A lease ends when nobody refers to it or to an array in it any more. It must not know
of images or processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from multiprocessing import reduction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """The owner's side. Leases may be taken and may end on any thread."""

    def __init__(self, num_bytes: int, *, holds: str = "pixels") -> None:
        """`num_bytes` is rounded up to whole pages, which take memory when they are first written to. `holds`: for
        whoever looks at a process's files."""
        self.num_bytes = _pages(num_bytes)
        self._file = os.memfd_create(f"vitray-{holds}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, self.num_bytes)
            self._memory = mmap.mmap(self._file, self.num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]  # (start, end), ascending, never touching
        # Leases end where the garbage collector finds them, maybe under the lock: they only leave a note.
        self._ended: deque[tuple[int, int]] = deque()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(end - start for start, end in self._free)

    def take(self, num_bytes: int) -> Lease | None:
        """The first gap that is large enough, or None."""
        wanted = _pages(num_bytes)
        with self._lock:
            self._take_back()
            for place, (start, end) in enumerate(self._free):
                if end - start >= wanted:
                    self._free[place : place + 1] = [(start + wanted, end)] if end - start > wanted else []
                    return Lease(self, start, wanted)
        return None

    @property
    def file(self) -> int:
        """Open for as long as the arena lives."""
        return self._file

    def handle(self) -> ArenaHandle:
        """What a child process gets as an argument when it is started, with the method "spawn"."""
        return ArenaHandle(self._file, self.num_bytes)

    def write(self, start: int, written: bytes) -> None:
        """Bytes into a lease of the caller's."""
        self._memory[start : start + len(written)] = written

    def _end(self, start: int, num_bytes: int) -> None:
        self._ended.append((start, start + num_bytes))

    def _take_back(self) -> None:
        while self._ended:
            self._free.append(self._ended.popleft())
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class Lease:
    """A piece of the arena. An array of `array` keeps it; without arrays it ends with its last reference."""

    def __init__(self, arena: Arena, start: int, num_bytes: int) -> None:
        self.start, self.num_bytes = start, num_bytes
        self._arena = arena

    def array(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """A view as bytes of this shape, which keeps the lease. Raises ValueError where it would not fit."""
        needed = int(np.prod(shape, dtype=np.int64))
        if min(shape, default=0) < 0 or needed > self.num_bytes:
            raise ValueError(f"{shape} takes {needed} bytes, the lease has {self.num_bytes}")
        return np.asarray(_View(self, self._arena.address + self.start, shape))

    def __del__(self) -> None:
        self._arena._end(self.start, self.num_bytes)


class _View:
    """What numpy makes an array of without copying, and keeps for as long as the array lives."""

    def __init__(self, lease: Lease, address: int, shape: tuple[int, ...]) -> None:
        self._lease = lease
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, False)}


class _Inherited(Protocol):
    """What `reduction.DupFd` becomes in the child."""

    def detach(self) -> int: ...


class ArenaHandle:
    """An arena on its way to a child process, which inherits the file; `open` there maps it."""

    def __init__(self, file: int, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def open(self) -> mmap.mmap:
        """The arena's memory, in the child."""
        memory = mmap.mmap(self._file, self._num_bytes)
        os.close(self._file)
        return memory

    def __reduce__(self) -> tuple[object, ...]:
        return _inherited, (reduction.DupFd(self._file), self._num_bytes)


def _inherited(file: _Inherited, num_bytes: int) -> ArenaHandle:
    return ArenaHandle(file.detach(), num_bytes)


def _pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
