"""The encoders' memory as an engine's worker process sees it: mapped, pinned where that helps, copied to its device.

It must not know of vLLM, nor why an embedding is wanted.
"""

from __future__ import annotations

import mmap
import os
import threading

import torch
from torch import Tensor

from deployments.embedding_header import HEADER_BYTES, check
from deployments.engine_table import Place
from deployments.wire import tensor_of_bytes
from encoder.lanes import pin_shared, unpin_shared


class EngineMemory:
    """Mapped and forgotten on one thread, read on another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._mapped: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def map(self, lender: str, file: int, num_bytes: int) -> None:
        """Takes `file` over. Raises OSError or RuntimeError where the memory cannot be mapped or pinned."""
        try:
            flat = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        finally:
            os.close(file)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                pin_shared(flat.data_ptr(), num_bytes)
        with self._lock:
            self._mapped[lender] = flat

    def forget(self, lender: str) -> None:
        """The lender has gone and nothing of it is needed any more."""
        with self._lock:
            flat = self._mapped.pop(lender, None)
        if flat is not None and self._device.type == "cuda":
            with torch.cuda.device(self._device):
                unpin_shared(flat.data_ptr())

    def load(self, place: Place, dtype: torch.dtype) -> Tensor:
        """The embedding `[num_tokens, width]` on the device. Blocks until it is there, which work on the device's
        current stream does not delay.

        Raises:
            KeyError, WrongEmbeddingError: the memory is not mapped, or something else lies there.
        """
        with self._lock:
            flat = self._mapped[place.lender]
        begin = place.start + HEADER_BYTES
        header = flat[place.start : begin].numpy()
        check(header.tobytes(), place.header)
        rows, width = place.header.shape
        source_dtype = torch.float32 if place.header.dtype == "float32" else torch.bfloat16
        end = begin + rows * width * source_dtype.itemsize
        found = tensor_of_bytes(flat[begin:end], place.header.dtype, place.header.shape)
        loaded = found.to(dtype, copy=True) if self._stream is None else self._copied(found, dtype, self._stream)
        check(header.tobytes(), place.header)  # as it was while it was copied
        return loaded

    def _copied(self, found: Tensor, dtype: torch.dtype, stream: torch.cuda.Stream) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            loaded = found.to(self._device, non_blocking=True).to(dtype)
        stream.synchronize()
        loaded.record_stream(current)  # its memory is not given to the next copy before `current` is done with it
        return loaded
