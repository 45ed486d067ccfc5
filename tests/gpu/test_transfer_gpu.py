"""Embeddings through pinned shared memory: off the device and onto it again without the host's copying a byte."""

from __future__ import annotations

import os
import time

import pytest
import torch

from deployments.embedding_header import Header, WrongEmbeddingError
from deployments.embedding_shelf import EmbeddingShelf
from deployments.engine_memory import EngineMemory
from deployments.engine_table import Place
from deployments.lending import Borrowed, Held, Lender
from deployments.wire import EncodedImage, EncodeTimings
from encoder.image_rules import ImageRules
from encoder.lanes import lanes_of, pin_shared, unpin_shared
from encoder.staging import Staging

pytestmark = pytest.mark.gpu

WIDTH = 4096
DIGEST = "a" * 64
PATIENCE_S = 60.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_arrives_bit_by_bit(dtype: torch.dtype) -> None:
    """Both ends pin the memory, as two processes do, and both unpin what goes."""
    device = torch.device("cuda")
    shelf = EmbeddingShelf(64 * 2**20)
    pin_shared(shelf.arena.address, shelf.arena.num_bytes)
    lender = Lender(shelf)
    borrowed = Borrowed(lender.address)
    memory = EngineMemory(device)
    memory.map(lender.address, os.dup(borrowed.file), borrowed.num_bytes)
    try:
        lanes = lanes_of(device)
        staging = Staging(ImageRules(), lanes)
        outputs = torch.randn(30, WIDTH, device=device).to(dtype)
        first, second = staging.fetch(outputs, [6, 24], lanes.compute.mark(), shelf.room)
        assert staging.counts.bytes_fetched_direct == outputs.nbytes
        assert staging.counts.bytes_fetched_pinned == 0
        assert torch.equal(second, outputs[6:].cpu())
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        image = EncodedImage.pack(first, (1, 4, 6), DIGEST, timings)
        assert shelf.offer(image)
        held = Held(image.lent_by(lender.address), borrowed, borrowed.hold(DIGEST).result(PATIENCE_S))
        place = Place("lease", lender.address, held.start, held.header, 0.0)
        loaded = memory.load(place, torch.bfloat16)
        assert loaded.device.type == "cuda"
        assert torch.equal(loaded, outputs[:6].to(torch.bfloat16))
        other = EncodedImage("b" * 64, image.grid_thw, image.dtype, image.bits, timings)
        shelf.offer(other)
        with pytest.raises(WrongEmbeddingError):
            memory.load(place, torch.bfloat16)
    finally:
        memory.forget(lender.address)
        borrowed.close()
        lender.close()
        unpin_shared(shelf.arena.address)


def test_what_is_not_pinned_comes_through_pinned_memory() -> None:
    device = torch.device("cuda")
    shelf = EmbeddingShelf(2**20)
    lanes = lanes_of(device)
    staging = Staging(ImageRules(), lanes)
    outputs = torch.randn(6, WIDTH, device=device)
    (found,) = staging.fetch(outputs, [6], lanes.compute.mark(), shelf.room)
    assert torch.equal(found, outputs.cpu())
    assert staging.counts.bytes_fetched_pinned == outputs.nbytes
    assert staging.counts.bytes_fetched_direct == 0


def test_a_load_waits_for_nothing_on_the_current_stream_and_is_whole_when_it_returns() -> None:
    """An encoder may write over the memory as soon as the load has returned."""
    device = torch.device("cuda")
    shelf = EmbeddingShelf(64 * 2**20)
    memory = EngineMemory(device)
    memory.map("here", os.dup(shelf.arena.file), shelf.arena.num_bytes)
    try:
        room = shelf.room(1024, WIDTH, torch.bfloat16)
        assert room is not None
        room.copy_(torch.randn(1024, WIDTH))
        expected = room.clone()
        image = EncodedImage.pack(room, (1, 64, 64), DIGEST, EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=False))
        shelf.offer(image)
        lent = shelf.lend(DIGEST)
        assert lent is not None
        place = Place("lease", "here", lent[0], Header(DIGEST, "bfloat16", (1024, WIDTH), (1, 64, 64)), 0.0)
        torch.cuda._sleep(200_000_000)  # cycles: the current stream has something to do
        loaded = memory.load(place, torch.bfloat16)
        room.zero_()
        assert torch.equal(loaded.cpu(), expected)
    finally:
        memory.forget("here")
