"""Embeddings in an encoder's shared memory, for the tests of transfers."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deployments.common.messages import EncodedImage, EncodeTimings
from deployments.transfer.header import Header, embedding_view
from deployments.transfer.receive_buffer import ReceivedEmbedding
from deployments.transfer.same_host import (
    EmbeddingUnavailableError,
    Lease,
    ShmClient,
)
from deployments.transfer.shared_store import EmbeddingStore

ROOT = Path(__file__).parents[4]
TIMINGS = EncodeTimings(1.0, 2.0, 3.0, 4.0, cached=False)
WIDTH = 64
PATIENCE_S = 60.0


def digest(number: int) -> str:
    return f"{number:064x}"


def header(number: int, *, tokens: int = 6) -> Header:
    """Of what `encoded` makes."""
    return Header(digest(number), "bfloat16", (tokens, WIDTH))


def encoded(
    store: EmbeddingStore,
    number: int = 1,
    *,
    tokens: int = 6,
    dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None,
) -> EncodedImage:
    """`seed`: of its content; by default its number, as an image is always encoded to the same."""
    room = store.allocate(tokens, WIDTH, dtype)
    assert room is not None
    generator = torch.Generator().manual_seed(number if seed is None else seed)
    room.copy_(torch.randn(tokens, WIDTH, generator=generator))
    return EncodedImage.pack(room, digest(number), TIMINGS)


def tokens_of(image: EncodedImage) -> torch.Tensor:
    """`[num_tokens, width]`, which shares its memory."""
    return torch.from_numpy(image.bits).view(getattr(torch, image.dtype))


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


def hold(client: ShmClient, image: EncodedImage) -> Lease:
    return client.acquire(Header.of(image)).result(PATIENCE_S)


def read(held: Lease | ReceivedEmbedding) -> torch.Tensor:
    """`[num_tokens, width]`, which shares the memory and keeps it. Raises WrongEmbeddingError."""
    if isinstance(held, Lease):
        memory = mmap.mmap(held.client.file, held.client.num_bytes)
        return embedding_view(torch.frombuffer(memory, dtype=torch.uint8)[held.offset :], held.header)
    assert held._memory is not None, "it was released"
    return embedding_view(torch.from_numpy(held._memory.array((held._memory.num_bytes,))), held.header)


def barrier(client: ShmClient) -> None:
    """Returns once the server has handled every release of this borrower's: answers come in order."""
    with pytest.raises(EmbeddingUnavailableError):
        client.acquire(header(0)).result(PATIENCE_S)
