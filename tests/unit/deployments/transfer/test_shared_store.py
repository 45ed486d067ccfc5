"""Offers of embeddings to readers that are about to come: for how long they are kept, and what ends them."""

from __future__ import annotations

import pytest
import torch

from deployments.common.messages import EncodedImage
from deployments.transfer.header import HEADER_BYTES
from deployments.transfer.shared_store import MIN_OFFER_AGE_S, EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import TIMINGS, WIDTH, digest, encoded

OFFER_TIMEOUT_S = 600.0
SLOT_BYTES = HEADER_BYTES + 4096


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture
def store(clock: Clock, dropped: list[int]) -> EmbeddingStore:
    """With room for two embeddings."""
    return EmbeddingStore(2 * SLOT_BYTES, offer_timeout_s=OFFER_TIMEOUT_S, clock=clock, on_evicted=dropped.append)


def offer(store: EmbeddingStore, number: int) -> None:
    """An embedding that the encoder's cache does not keep."""
    assert store.offer(encoded(store, number))


def offered(store: EmbeddingStore) -> list[int]:
    return [number for number in range(10) if store.is_offered(digest(number))]


def test_an_offer_is_kept_for_as_long_as_its_request_may_wait(
    store: EmbeddingStore, clock: Clock, dropped: list[int]
) -> None:
    """Offers ended after 10 s. Where language models queued longer, every waiting request failed its transfer once and
    its images were encoded twice."""
    offer(store, 1)
    offer(store, 1)
    clock.now = OFFER_TIMEOUT_S - 0.1
    store.expire_offers()
    lent = store.acquire(digest(1))
    assert lent is not None
    del lent
    assert offered(store) == [1], "to the other reader"
    clock.now = OFFER_TIMEOUT_S
    store.expire_offers()
    assert store.arena.free_bytes == store.arena.num_bytes
    assert dropped == [], "nobody can come for it any more"


def test_old_offers_make_room_the_oldest_first(store: EmbeddingStore, clock: Clock, dropped: list[int]) -> None:
    offer(store, 1)
    clock.now = 1.0
    offer(store, 2)
    assert store.allocate(6, WIDTH, torch.bfloat16) is None
    clock.now = MIN_OFFER_AGE_S
    offer(store, 3)
    assert offered(store) == [2, 3]
    assert dropped == [1]


def test_an_offer_that_is_no_older_than_those_read_lately_makes_no_room(
    store: EmbeddingStore, clock: Clock, dropped: list[int]
) -> None:
    """Where readers come late, a late reader's embedding is not the one to be encoded again."""
    offer(store, 1)
    clock.now = 30.0
    offer(store, 2)
    assert store.acquire(digest(1)) is not None, "its request has waited for 30 s"
    offer(store, 3)
    clock.now = 59.9
    assert store.allocate(6, WIDTH, torch.bfloat16) is None
    assert offered(store) == [2, 3]
    clock.now = 60.0
    assert store.allocate(6, WIDTH, torch.bfloat16) is not None
    assert dropped == [2]


def test_a_reader_that_never_came_does_not_make_later_ones_late(
    store: EmbeddingStore, clock: Clock, dropped: list[int]
) -> None:
    """Each read of an image that came once a minute counted as a wait of 60 s after one request was cancelled, and
    offers made no room for that long."""
    image = encoded(store, 1)
    assert store.offer(image)
    for minute in range(1, 4):
        clock.now = 60.0 * minute
        assert store.offer(image)
        assert store.acquire(digest(1)) is image
    offer(store, 2)
    clock.now += MIN_OFFER_AGE_S
    assert store.allocate(6, WIDTH, torch.bfloat16) is not None
    assert dropped == [1 + 1]


def test_an_offer_that_is_repeated_counts_from_then_on(store: EmbeddingStore, clock: Clock) -> None:
    image = encoded(store, 1)
    store.offer(image)
    clock.now = 1.0
    offer(store, 2)
    clock.now = 2.0
    store.offer(image)
    del image
    clock.now = MIN_OFFER_AGE_S + 1.0
    offer(store, 3)
    assert offered(store) == [1, 3]


def test_an_embedding_can_be_found_for_as_long_as_anybody_holds_it(store: EmbeddingStore) -> None:
    image = encoded(store, 1)
    assert store.find(image.digest) is None
    assert store.publish(image)
    assert store.find(image.digest) is image
    again = EncodedImage(image.digest, image.dtype, image.bits, TIMINGS)  # as an answer from the cache
    store.offer(again)
    lent = store.acquire(image.digest)
    assert lent is not None
    assert lent is image, "one object stands for the copy, or it was lost with the other one"
    del image, again
    assert store.find(digest(1)) is lent
    del lent
    assert store.find(digest(1)) is None
    assert store.arena.free_bytes == store.arena.num_bytes


def test_an_embedding_of_private_memory_is_found_and_has_no_offset(store: EmbeddingStore) -> None:
    image = EncodedImage.pack(torch.zeros(6, WIDTH), digest(1), TIMINGS)
    assert store.publish(image) is image
    assert store.find(image.digest) is image
    assert store.offset_of(image) is None
    del image
    assert store.find(digest(1)) is None
