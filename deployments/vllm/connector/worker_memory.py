"""Encoders' memory in a worker process of the engine: mapped, pinned for a GPU, copied to the worker's device."""

from __future__ import annotations

import mmap
import os
import threading

import torch
from torch import Tensor

from deployments.transfer.header import embedding_view
from deployments.vllm.connector.lease_table import EngineLease
from encoder.staging.streams import pin_shared, unpin_shared


class WorkerMemory:
    """Memory of encoders, mapped and unmapped on one thread, read on another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._mapped: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def map(self, server: str, file: int, num_bytes: int) -> None:
        """Takes ownership of `file`. Raises OSError or RuntimeError if the memory cannot be mapped or pinned."""
        try:
            flat = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
        finally:
            os.close(file)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                pin_shared(flat.data_ptr(), num_bytes)
        with self._lock:
            self._mapped[server] = flat

    def unmap(self, server: str) -> None:
        """Must be called only when no lease refers to the memory any more."""
        with self._lock:
            flat = self._mapped.pop(server, None)
        if flat is not None and self._device.type == "cuda":
            with torch.cuda.device(self._device):
                unpin_shared(flat.data_ptr())

    def load(self, lease: EngineLease, dtype: torch.dtype) -> Tensor:
        """Returns the embedding `[num_tokens, width]` in `dtype` on the device. Blocks until the copy is done; work on
        the device's current stream does not delay it.

        Raises:
            KeyError: the memory is not mapped.
            WrongEmbeddingError: it holds another embedding.
        """
        with self._lock:
            flat = self._mapped[lease.server][lease.offset :]
        embedding = embedding_view(flat, lease.header)
        loaded = (
            embedding.to(dtype, copy=True)
            if self._stream is None
            else self._copy_to_device(embedding, dtype, self._stream)
        )
        embedding_view(flat, lease.header)  # it may have changed during the copy
        return loaded

    def _copy_to_device(self, embedding: Tensor, dtype: torch.dtype, stream: torch.cuda.Stream) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            loaded = embedding.to(self._device, non_blocking=True).to(dtype)
        stream.synchronize()
        loaded.record_stream(current)  # the next copy must not reuse its memory before `current` is done with it
        return loaded
