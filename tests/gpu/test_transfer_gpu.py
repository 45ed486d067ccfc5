"""Embeddings through pinned shared memory: off the device and onto it again without the host's copying a byte."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("msgspec", reason="processes of one host exchange msgspec messages")

from deployments.common.messages import EncodedImage, EncodeTimings  # noqa: E402
from deployments.transfer.header import Header, WrongEmbeddingError  # noqa: E402
from deployments.transfer.same_host import ShmClient, ShmServer  # noqa: E402
from deployments.transfer.shared_store import EmbeddingStore  # noqa: E402
from deployments.vllm.connector.lease_table import EngineLease  # noqa: E402
from deployments.vllm.connector.worker_memory import WorkerMemory  # noqa: E402
from encoder.checkpoint.image_rules import ImageRules  # noqa: E402
from encoder.staging.staging import Staging  # noqa: E402
from encoder.staging.streams import lanes_for, pin_shared, unpin_shared  # noqa: E402

WIDTH = 4096
DIGEST = "a" * 64
PATIENCE_S = 60.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_arrives_bit_by_bit(dtype: torch.dtype) -> None:
    """Both ends pin the memory, as two processes do, and both unpin what goes."""
    device = torch.device("cuda")
    store = EmbeddingStore(64 * 2**20)
    pin_shared(store.arena.address, store.arena.num_bytes)
    server = ShmServer(store)
    client = ShmClient(server.address)
    memory = WorkerMemory(device)
    memory.map(server.address, os.dup(client.file), client.num_bytes)
    try:
        lanes = lanes_for(device)
        staging = Staging(ImageRules(), lanes)
        outputs = torch.randn(30, WIDTH, device=device).to(dtype)
        first, second = staging.fetch(outputs, [6, 24], lanes.compute.mark(), store.allocate)
        assert staging.counts.bytes_fetched_direct == outputs.nbytes
        assert staging.counts.bytes_fetched_pinned == 0
        assert torch.equal(second, outputs[6:].cpu())
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        image = EncodedImage.pack(first, DIGEST, timings)
        assert store.offer(image)
        held = client.acquire(Header.of(image)).result(PATIENCE_S)
        place = EngineLease("lease", server.address, held.offset, held.header, 0.0)
        loaded = memory.load(place, torch.bfloat16)
        assert loaded.device.type == "cuda"
        assert torch.equal(loaded, outputs[:6].to(torch.bfloat16))
        other = EncodedImage("b" * 64, image.dtype, image.bits, timings)
        store.offer(other)
        with pytest.raises(WrongEmbeddingError):
            memory.load(place, torch.bfloat16)
    finally:
        memory.unmap(server.address)
        client.close()
        server.close()
        unpin_shared(store.arena.address)


def test_what_is_not_pinned_comes_through_pinned_memory() -> None:
    device = torch.device("cuda")
    store = EmbeddingStore(2**20)
    lanes = lanes_for(device)
    staging = Staging(ImageRules(), lanes)
    outputs = torch.randn(6, WIDTH, device=device)
    (found,) = staging.fetch(outputs, [6], lanes.compute.mark(), store.allocate)
    assert torch.equal(found, outputs.cpu())
    assert staging.counts.bytes_fetched_pinned == outputs.nbytes
    assert staging.counts.bytes_fetched_direct == 0


def test_a_load_waits_for_nothing_on_the_current_stream_and_is_whole_when_it_returns() -> None:
    """An encoder may write over the memory as soon as the load has returned."""
    device = torch.device("cuda")
    store = EmbeddingStore(64 * 2**20)
    memory = WorkerMemory(device)
    memory.map("here", os.dup(store.arena.file), store.arena.num_bytes)
    try:
        room = store.allocate(1024, WIDTH, torch.bfloat16)
        assert room is not None
        room.copy_(torch.randn(1024, WIDTH))
        expected = room.clone()
        image = EncodedImage.pack(room, DIGEST, EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=False))
        store.offer(image)
        lent = store.acquire(DIGEST)
        assert lent is not None
        offset = store.offset_of(lent)
        assert offset is not None
        place = EngineLease("lease", "here", offset, Header(DIGEST, "bfloat16", (1024, WIDTH)), 0.0)
        torch.cuda._sleep(200_000_000)  # cycles: the current stream has something to do
        loaded = memory.load(place, torch.bfloat16)
        room.zero_()
        assert torch.equal(loaded.cpu(), expected)
    finally:
        memory.unmap("here")
