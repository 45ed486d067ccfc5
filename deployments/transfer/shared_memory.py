"""Shared memory between processes: one bounded anonymous region, divided into allocations.

Decoding worker processes write pixels into one, encoders write embeddings into another. The memory is a memfd that is
passed to other processes: nothing is stored in /dev/shm, and the kernel frees it when the last process that maps it has
ended, even if it was killed. An allocation is freed with the last reference to it or to an array in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


class Arena:
    """Shared memory in the process that owns it. Thread-safe."""

    def __init__(self, num_bytes: int, *, purpose: str = "pixels") -> None:
        """`num_bytes` is rounded up to whole pages, which take memory when they are first written to. `purpose` is part
        of the memfd's name."""
        self.num_bytes = _round_up_to_pages(num_bytes)
        self.file = os.memfd_create(f"vitray-{purpose}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.num_bytes)
        self._memory = mmap.mmap(self.file, self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]  # (start, end), ascending, never adjacent
        # The garbage collector may free an allocation while the lock is held, so `_free_later` only records it.
        self._freed: deque[tuple[int, int]] = deque()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._reclaim()
            return sum(end - start for start, end in self._free)

    def allocate(self, num_bytes: int) -> Allocation | None:
        """Allocates from the first gap that is large enough. Returns None if there is none."""
        size_bytes = _round_up_to_pages(num_bytes)
        with self._lock:
            self._reclaim()
            for index, (start, end) in enumerate(self._free):
                if end - start >= size_bytes:
                    self._free[index : index + 1] = [(start + size_bytes, end)] if end - start > size_bytes else []
                    return Allocation(self, start, size_bytes)
        return None

    def write(self, offset: int, content: bytes) -> None:
        """Writes bytes at offset `offset`, inside an allocation of the caller."""
        self._memory[offset : offset + len(content)] = content

    def _free_later(self, offset: int, num_bytes: int) -> None:
        self._freed.append((offset, offset + num_bytes))

    def _reclaim(self) -> None:
        while self._freed:
            self._free.append(self._freed.popleft())
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, end in self._free:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged

    def __reduce__(self) -> tuple[object, ...]:
        """A child process that is started by the method "spawn" gets the memory, mapped, instead of this argument."""
        return _map_inherited, (reduction.DupFd(self.file), self.num_bytes)


class Allocation:
    """Part of an arena, freed with the last reference to it or to an array of `array`."""

    def __init__(self, arena: Arena, offset: int, num_bytes: int) -> None:
        self.offset, self.num_bytes = offset, num_bytes
        self._arena = arena

    def array(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Returns a uint8 view of this shape, which keeps the allocation. Raises ValueError if it does not fit."""
        needed = int(np.prod(shape, dtype=np.int64))
        if min(shape, default=0) < 0 or needed > self.num_bytes:
            raise ValueError(f"{shape} takes {needed} bytes, the allocation has {self.num_bytes}")
        return np.asarray(_View(self, self._arena.address + self.offset, shape))

    def __del__(self) -> None:
        self._arena._free_later(self.offset, self.num_bytes)  # noqa: SLF001


class _View:
    """Source of a numpy array without a copy. The array keeps it, and thereby the allocation, alive."""

    def __init__(self, allocation: Allocation, address: int, shape: tuple[int, ...]) -> None:
        self._allocation = allocation
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": (address, False)}


def _map_inherited(inherited: Any, num_bytes: int) -> mmap.mmap:  # noqa: ANN401 - an unpickled `reduction.DupFd`
    file = inherited.detach()
    memory = mmap.mmap(file, num_bytes)
    os.close(file)
    return memory


def _round_up_to_pages(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
