"""Streams as the staging needs them: work in order on a lane, marks between lanes, a wait of the host for a mark.

On a GPU a lane is a CUDA stream; on the CPU work is done when it is given. It must not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark(Protocol):
    """A point in a lane."""

    def wait(self) -> None:
        """Blocks the host until all work before it is done."""

    def passed(self) -> bool:
        """Whether all work before it is done."""


class Lane(Protocol):
    """Work in order."""

    def do(self, work: Callable[[], T]) -> T:
        """Gives the lane `work`, which may be done after the call has returned."""

    def mark(self) -> Mark:
        """A mark behind all work so far."""

    def after(self, mark: Mark) -> None:
        """What is given from now on is done after what lies before the mark."""


@dataclass(frozen=True)
class Lanes:
    """Copies in, computing, copies out; and the host memory that such copies need."""

    copy_in: Lane
    compute: Lane
    copy_out: Lane
    device: torch.device
    host_buffer: Callable[[int], Tensor]
    """So many bytes, uint8, pinned where the device copies from pinned memory only."""
    direct: Callable[[Tensor], bool]
    """Whether the device copies straight from this host tensor, without the host's help."""


class _Passed:
    def wait(self) -> None: ...

    def passed(self) -> bool:
        return True


class _Immediate:
    """The CPU's lane."""

    def do(self, work: Callable[[], T]) -> T:
        return work()

    def mark(self) -> Mark:
        return _Passed()

    def after(self, mark: Mark) -> None: ...


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())


class _CudaLane:
    """A stream; None is whichever is current when work is given, which a thread may change."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def _current(self) -> torch.cuda.Stream:
        return self._stream if self._stream is not None else torch.cuda.current_stream(self._device)

    def do(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self._current()):
            return work()

    def mark(self) -> Mark:
        # Blocking: a host that waits sleeps, and leaves its core to the decoders.
        event = torch.cuda.Event(blocking=True)
        event.record(self._current())
        return _CudaMark(event)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._current().wait_event(mark.event)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device; computing is on the stream that is current where it is asked for."""
    if device.type != "cuda":
        lane = _Immediate()
        return Lanes(lane, lane, lane, device, _plain_buffer, lambda _: True)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    return Lanes(
        _CudaLane(device, streams[0]),
        _CudaLane(device, None),
        _CudaLane(device, streams[1]),
        device,
        _pinned_buffer,
        lambda tensor: tensor.is_pinned(),
    )


def _plain_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _pinned_buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pin_shared(address: int, num_bytes: int) -> None:
    """Pins memory that is mapped already, until `unpin_shared`, so that a GPU copies straight from it.

    Raises RuntimeError where CUDA refuses.
    """
    code = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"CUDA refused to pin {num_bytes} bytes of shared memory: error {int(code)}")


def unpin_shared(address: int) -> None:
    """Takes `pin_shared` back: before memory is unmapped, in a process that goes on. Raises RuntimeError as it does."""
    code = torch.cuda.cudart().cudaHostUnregister(address)
    if int(code) != 0:
        raise RuntimeError(f"CUDA refused to unpin shared memory: error {int(code)}")
