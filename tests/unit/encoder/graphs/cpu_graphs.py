"""`EncoderGraphs` on the CPU: what is recorded is run again at each replay, and the device's clock is the host's."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable

import torch

from encoder.graphs.buffers import GraphCapacity
from encoder.graphs.captured import EncoderGraphs

POOL_BYTES = 1000


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


class _Recorded:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class CpuGraphs(EncoderGraphs):
    """With `without_a_device` in place."""

    def _record(self, shape: GraphCapacity) -> tuple[torch.cuda.CUDAGraph, int]:
        self._forward_in_place(shape)
        recorded = _Recorded(lambda: self._forward_in_place(shape))
        return recorded, POOL_BYTES  # type: ignore[return-value]


def without_a_device(put: Callable[[object, str, object], object]) -> None:
    """Puts stand-ins into `torch.cuda`: `put` is `setattr`, or a monkeypatch's."""
    for name, stand_in in {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda *_: types.SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda *_: types.SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (2**40, 2**40),
        "Event": _Event,
    }.items():
        put(torch.cuda, name, stand_in)
