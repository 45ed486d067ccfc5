"""Lanes (ordered work queues) and marks (synchronisation points): CUDA streams and events on a GPU, immediate execution
on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark:
    """A point in a lane; on the CPU it has always passed."""

    def wait(self) -> None:
        """Blocks the host until all work before the mark is done."""

    def is_done(self) -> bool:
        """Returns whether all work before the mark is done."""
        return True


class Lane:
    """An ordered queue of device work; this CPU implementation executes it immediately."""

    def enqueue(self, work: Callable[[], T]) -> T:
        """Queues the device work of `work`, which may finish after the call returns. Returns `work()`."""
        return work()

    def mark(self) -> Mark:
        """Returns a mark after all work queued so far."""
        return Mark()

    def wait_for(self, mark: Mark) -> None:
        """Makes work queued from now on wait for the mark."""


@dataclass(frozen=True)
class Lanes:
    """Lanes of one device for copies in, compute and copies out, and the host memory for such copies."""

    copy_in: Lane
    compute: Lane
    copy_out: Lane
    device: torch.device
    host_buffer: Callable[[int], Tensor]
    """Allocates a uint8 buffer of that many bytes, pinned if the device is a GPU."""
    is_pinned: Callable[[Tensor], bool]
    """Whether the device can copy directly from or to this host tensor (pinned memory)."""


class _CudaMark(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())


class _CudaLane(Lane):
    """A CUDA stream. `stream=None` is the current stream at the time of each call, which may differ per thread."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def _current(self) -> torch.cuda.Stream:
        return self._stream if self._stream is not None else torch.cuda.current_stream(self._device)

    def enqueue(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self._current()):
            return work()

    def mark(self) -> Mark:
        # Blocking: a waiting host thread sleeps and leaves its core to the decoders.
        event = torch.cuda.Event(blocking=True)
        event.record(self._current())
        return _CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._current().wait_event(mark.event)


def lanes_for(device: torch.device) -> Lanes:
    """Returns the lanes of a device; compute uses the stream that is current at each call."""
    if device.type != "cuda":
        lane = Lane()
        return Lanes(lane, lane, lane, device, partial(torch.empty, dtype=torch.uint8), lambda _: True)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    return Lanes(
        _CudaLane(device, streams[0]),
        _CudaLane(device, None),
        _CudaLane(device, streams[1]),
        device,
        partial(torch.empty, dtype=torch.uint8, pin_memory=True),
        lambda tensor: tensor.is_pinned(),
    )


def pin_shared(address: int, num_bytes: int) -> None:
    """Pins mapped memory until `unpin_shared` for direct GPU access. Raises RuntimeError if CUDA refuses."""
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"CUDA refused to pin {num_bytes} bytes of shared memory: error {int(code)}")


def unpin_shared(address: int) -> None:
    """Undoes `pin_shared`, before a process that continues unmaps the memory. Raises RuntimeError if CUDA refuses."""
    code = torch.cuda.cudart().cudaHostUnregister(address)
    if int(code) != 0:
        raise RuntimeError(f"CUDA refused to unpin shared memory: error {int(code)}")
