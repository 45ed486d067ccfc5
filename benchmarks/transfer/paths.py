"""Paths of an embedding from one process to another on one host, each a sender and a receiver.

A sender has the computed embedding on its device; a receiver returns when it has it on its own. They share a channel
for small messages and an anonymous piece of shared memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Protocol, cast

import torch
from torch import Tensor

from deployments.common.messages import EncodedImage, EncodeTimings, SharedEmbedding
from deployments.transfer.header import Header
from deployments.transfer.same_host import ShmClient, ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.vllm.connector.lease_table import EngineLease
from deployments.vllm.connector.worker_memory import WorkerMemory
from encoder.checkpoint.image_rules import ImageRules
from encoder.staging.staging import Staging
from encoder.staging.streams import Mark, lanes_for, pin_shared

MIB = 2**20
HEADER_BYTES = mmap.PAGESIZE
"""Header before an embedding: the number of its bytes that have been written."""
SHELVES = 4
"""Capacity of a store in embeddings."""
SLOTS = 2
"""Number of slots used in turn, so that one embedding stays complete while the next is written."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Side:
    """Resources of one of the two processes."""

    device: torch.device
    channel: Connection
    memory: mmap.mmap
    most_bytes: int
    """Bytes of the largest embedding."""


class Sender(Protocol):
    def send(self, tokens: Tensor) -> None:
        """Sends `tokens` when the device has computed them; may return before the receiver has them."""


class Receiver(Protocol):
    def receive(self, out: Tensor) -> Tensor:
        """Returns the embedding on the receiver's device: `out`, or other memory of its shape."""


def slot_bytes(most_bytes: int) -> int:
    return HEADER_BYTES + -(-most_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _Slots:
    """The shared memory as tensors."""

    def __init__(self, side: Side, *, pinned: bool) -> None:
        flat = torch.frombuffer(side.memory, dtype=torch.uint8)
        if pinned and side.device.type == "cuda":
            pin_shared(flat.data_ptr(), flat.numel())
        each = slot_bytes(side.most_bytes)
        slots = [flat[each * number : each * (number + 1)] for number in range(SLOTS)]
        self.bytes = [slot[HEADER_BYTES:] for slot in slots]
        # An aligned machine word is read and written atomically, so a reader sees either the old or the new number.
        self.arrived = [ctypes.c_int64.from_address(slot.data_ptr()) for slot in slots]
        self._turn = 0

    def turn(self) -> int:
        self._turn = (self._turn + 1) % SLOTS
        return self._turn


class SharedMemorySender:
    """Copies device memory to shared memory in chunks, each announced when it is complete."""

    def __init__(self, side: Side, *, pinned: bool, chunk: int | None) -> None:
        self._side, self._chunk = side, chunk
        self._slots = _Slots(side, pinned=pinned)
        self._lane = lanes_for(side.device).copy_out

    def send(self, tokens: Tensor) -> None:
        turn = self._slots.turn()
        arrived, slot = self._slots.arrived[turn], self._slots.bytes[turn]
        source = tokens.reshape(-1).view(torch.uint8)
        total, chunk = source.numel(), self._chunk or source.numel()
        if self._chunk is not None:
            arrived.value = 0
            self._side.channel.send((turn, total))
        marks: list[tuple[Mark, int]] = []
        for start in range(0, total, chunk):
            end = min(start + chunk, total)
            self._lane.enqueue(partial(slot[start:end].copy_, source[start:end], non_blocking=True))
            marks.append((self._lane.mark(), end))
        for mark, end in marks:
            mark.wait()
            arrived.value = end
        if self._chunk is None:
            self._side.channel.send((turn, total))


class SharedMemoryReceiver:
    """Copies shared memory to the device as far as it has been filled."""

    def __init__(self, side: Side, *, pinned: bool, chunk: int | None) -> None:
        self._side, self._chunk = side, chunk
        self._slots = _Slots(side, pinned=pinned)
        self._lane = lanes_for(side.device).copy_in

    def receive(self, out: Tensor) -> Tensor:
        turn, total = self._side.channel.recv()
        arrived, slot = self._slots.arrived[turn], self._slots.bytes[turn]
        target = out.view(-1).view(torch.uint8)
        done, patience = 0, time.monotonic() + PATIENCE_S
        while done < total:
            if (there := arrived.value) > done:
                self._lane.enqueue(partial(target[done:there].copy_, slot[done:there], non_blocking=True))
                done = there
            elif time.monotonic() > patience:
                raise TimeoutError(f"{done} of {total} bytes arrived within {PATIENCE_S} s")
        self._lane.mark().wait()
        return out


class CudaIpcSender:
    """Uses device memory that the receiver opened once; the embedding is copied there first, or is already there."""

    def __init__(self, side: Side, *, copies: bool) -> None:
        self._side, self._copies = side, copies
        self.buffer = torch.empty(side.most_bytes, dtype=torch.uint8, device=side.device)
        side.channel.send_bytes(bytes(ForkingPickler.dumps(self.buffer)))

    def send(self, tokens: Tensor) -> None:
        source = tokens.reshape(-1).view(torch.uint8)
        if self._copies:
            self.buffer[: source.numel()].copy_(source)
            torch.cuda.synchronize(self._side.device)
        self._side.channel.send(source.numel())


class CudaIpcReceiver:
    def __init__(self, side: Side) -> None:
        self._side = side
        self._remote = cast(Tensor, ForkingPickler.loads(side.channel.recv_bytes()))

    def receive(self, out: Tensor) -> Tensor:
        count = self._side.channel.recv()
        out.view(-1).view(torch.uint8).copy_(self._remote[:count])
        torch.cuda.synchronize(self._side.device)
        return out


class CudaHandleSender:
    """Sends a handle for every embedding, as `torch.multiprocessing` sends tensors."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._sent: Tensor | None = None

    def send(self, tokens: Tensor) -> None:
        self._sent = tokens  # kept until the next one, because the receiver may still read it
        self._side.channel.send_bytes(bytes(ForkingPickler.dumps(tokens)))


class CudaHandleReceiver:
    def __init__(self, side: Side) -> None:
        self._side = side

    def receive(self, out: Tensor) -> Tensor:
        remote = cast(Tensor, ForkingPickler.loads(self._side.channel.recv_bytes()))
        out.copy_(remote)
        torch.cuda.synchronize(self._side.device)
        return out


class LendingSender:
    """Works as an encoder replica: copies the embedding directly to the store, and publishes it there."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._store = EmbeddingStore(SHELVES * slot_bytes(side.most_bytes))
        self._server = ShmServer(self._store)
        if side.device.type == "cuda":
            pin_shared(self._store.arena.address, self._store.arena.num_bytes)
        self._lanes = lanes_for(side.device)
        self._staging = Staging(ImageRules(), self._lanes)
        self._number = 0

    def send(self, tokens: Tensor) -> None:
        rows = len(tokens)
        (fetched,) = self._staging.fetch(tokens, [rows], self._lanes.compute.mark(), self._store.allocate)
        self._number += 1
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        image = EncodedImage.pack(fetched, f"{self._number:064x}", timings)
        if not self._store.offer(image):
            raise RuntimeError("the store is full")
        self._side.channel.send(image.to_shared(self._server.address))


class BorrowingReceiver:
    """Works as an LLM replica and a worker of its engine in one process, without vLLM's scheduler."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._memory = WorkerMemory(side.device)
        self._client: ShmClient | None = None

    def receive(self, out: Tensor) -> Tensor:
        image: SharedEmbedding = self._side.channel.recv()
        if self._client is None:
            self._client = ShmClient(image.server)
            self._memory.map(image.server, os.dup(self._client.file), self._client.num_bytes)
        lease = self._client.acquire(Header.of(image)).result(PATIENCE_S)
        loaded = self._memory.load(EngineLease("", image.server, lease.offset, lease.header, 0.0), out.dtype)
        lease.release()
        return loaded


@dataclass(frozen=True)
class MeasuredPath:
    sender: Callable[[Side], Sender]
    receiver: Callable[[Side], Receiver]
    says: str
    needs_gpu: bool = False


def _shared(pinned: bool, chunk: int | None, says: str) -> MeasuredPath:
    return MeasuredPath(
        partial(SharedMemorySender, pinned=pinned, chunk=chunk),
        partial(SharedMemoryReceiver, pinned=pinned, chunk=chunk),
        says,
    )


TRANSFER_PATHS: dict[str, MeasuredPath] = {
    "application": MeasuredPath(LendingSender, BorrowingReceiver, "the application's own code, without Serve and vLLM"),
    "shared_memory": _shared(True, None, "pinned at both ends, one copy out, then one copy in"),
    "shared_memory_2mib": _shared(True, 2 * MIB, "likewise in chunks of 2 MiB, copies out and in at the same time"),
    "shared_memory_8mib": _shared(True, 8 * MIB, "likewise in chunks of 8 MiB"),
    "shared_memory_32mib": _shared(True, 32 * MIB, "likewise in chunks of 32 MiB"),
    "shared_memory_pageable": _shared(False, None, "not pinned"),
    "cuda_ipc": MeasuredPath(
        partial(CudaIpcSender, copies=True),
        CudaIpcReceiver,
        "device memory opened once; a copy into it, a copy from there to the other device",
        needs_gpu=True,
    ),
    "cuda_ipc_in_place": MeasuredPath(
        partial(CudaIpcSender, copies=False),
        CudaIpcReceiver,
        "likewise, where the embedding was computed into it",
        needs_gpu=True,
    ),
    "cuda_ipc_handles": MeasuredPath(
        CudaHandleSender, CudaHandleReceiver, "a handle of torch.multiprocessing for each embedding", needs_gpu=True
    ),
}
