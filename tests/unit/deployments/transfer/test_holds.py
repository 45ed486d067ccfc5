"""Shared memory of an encoder under readers, evictions and releases in any order, against a model of who holds what.

No byte of a held copy changes, and what nobody holds is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.common.messages import EncodedImage
from deployments.transfer.header import HEADER_BYTES, Header
from deployments.transfer.same_host import EmbeddingUnavailableError, Lease, ShmClient, ShmServer
from deployments.transfer.shared_memory import PAGE_BYTES
from deployments.transfer.shared_store import MIN_OFFER_AGE_S, EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import PATIENCE_S, TIMINGS, barrier, digest, eventually, read

WIDTH = 16
ROWS = PAGE_BYTES // (4 * WIDTH)
"""An embedding takes a page, and its header another."""
COPIES = 4
"""So many have room."""
OFFER_TIMEOUT_S = 600.0
READERS = 3

digests = st.integers(1, 2)
readers = st.integers(0, READERS - 1)


@dataclass
class Reading:
    """What one reader holds, and what its request is reading."""

    reader: int
    value: float
    held: Lease
    tensor: torch.Tensor


@dataclass
class Offers:
    """Of one digest: the copy, how many have not come, and when it was offered to the last of them."""

    value: float
    number: int
    made_at_s: float


class Holds(RuleBasedStateMachine):
    """Copies are told apart by the one value that each is filled with."""

    @initialize()
    def start(self) -> None:
        self.now, self.value = 0.0, 0.0
        self.store = EmbeddingStore(COPIES * 2 * PAGE_BYTES, offer_timeout_s=OFFER_TIMEOUT_S, clock=lambda: self.now)
        self.server = ShmServer(self.store)
        self.readers = [ShmClient(self.server.address) for _ in range(READERS)]
        self.cache: dict[int, EncodedImage] = {}
        self.last: dict[int, float] = {}  # by digest, the copy that was encoded or offered last
        self.offers: dict[int, Offers] = {}
        self.waits_s = [0.0]
        self.reading: list[Reading] = []

    @rule(number=digests)
    def encode(self, number: int) -> None:
        """Whether there is a copy already or not; the cache drops an earlier one."""
        if len(self.live()) == COPIES:
            self.end_offers(max(MIN_OFFER_AGE_S, *self.waits_s))
        is_full = len(self.live()) == COPIES
        room = self.store.allocate(ROWS, WIDTH, torch.float32)
        assert (room is None) == is_full
        if room is None:
            return
        self.value += 1
        room.fill_(self.value)
        image = EncodedImage.pack(room, digest(number), TIMINGS)
        assert self.store.publish(image)
        self.cache[number], self.last[number] = image, self.value

    @rule(number=digests, times=st.integers(1, 3))
    def answer(self, number: int, times: int) -> None:
        """So many requests, from the cache or with what is still there."""
        found, image = self.found(number), self.cache.get(number) or self.store.find(digest(number))
        if image is None:
            assert found is None
            return
        value = float(image.bits[0, 0])
        assert number in self.cache or value == found
        before = self.offers[number].number if number in self.offers else 0
        for _ in range(times):
            assert self.store.offer(image)
        self.offers[number], self.last[number] = Offers(value, before + times, self.now), value

    @rule(number=digests, reader=readers, direct_read=st.booleans())
    def hold(self, number: int, reader: int, direct_read: bool) -> None:
        found = self.found(number)
        asked = self.readers[reader].acquire(Header(digest(number), "float32", (ROWS, WIDTH)), direct_read=direct_read)
        if found is None:
            with pytest.raises(EmbeddingUnavailableError):
                asked.result(PATIENCE_S)
            return
        held = asked.result(PATIENCE_S)
        self.reading.append(Reading(reader, found, held, read(held)))
        if not direct_read and number in self.offers:
            self.waits_s.append(self.now - self.offers[number].made_at_s)
            self.offers[number].number -= 1
            if not self.offers[number].number:
                del self.offers[number]

    @precondition(lambda self: self.reading)
    @rule(which=st.randoms(use_true_random=False), twice=st.booleans())
    def release(self, which: object, twice: bool) -> None:
        reading = self.reading.pop(which.randrange(len(self.reading)))  # type: ignore[attr-defined]
        for _ in range(1 + twice):
            reading.held.release()

    @rule(number=digests)
    def evict(self, number: int) -> None:
        self.cache.pop(number, None)

    @rule(reader=readers)
    def end(self, reader: int) -> None:
        """A language model goes, and another one comes."""
        self.readers[reader].close()
        self.reading = [reading for reading in self.reading if reading.reader != reader]
        eventually(lambda: len(self.server._listener._connections) == len(self.readers) - 1)
        self.readers[reader] = ShmClient(self.server.address)
        barrier(self.readers[reader])

    @rule(seconds=st.sampled_from((1.0, MIN_OFFER_AGE_S, OFFER_TIMEOUT_S)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire_offers()
        self.end_offers(OFFER_TIMEOUT_S)

    @invariant()
    def no_byte_of_a_held_copy_changes(self) -> None:
        for reading in self.reading:
            assert (reading.tensor == reading.value).all()
            read(reading.held)  # its header, too

    @invariant()
    def what_nobody_holds_is_free(self) -> None:
        for client in self.readers:
            barrier(client)
        used = self.store.arena.num_bytes - self.store.arena.free_bytes
        assert used == len(self.live()) * (HEADER_BYTES + PAGE_BYTES)

    def end_offers(self, age_s: float) -> None:
        ended = [number for number, offers in self.offers.items() if offers.made_at_s <= self.now - age_s]
        for number in ended:
            del self.offers[number]

    def found(self, number: int) -> float | None:
        """The copy that a reader gets: the one that was offered, or else the last one if anybody holds it."""
        if number in self.offers:
            return self.offers[number].value
        last = self.last.get(number)
        return last if last in self.live() else None

    def live(self) -> set[float]:
        """Values of the copies that anybody holds."""
        cached = {float(image.bits[0, 0]) for image in self.cache.values()}
        offered = {offers.value for offers in self.offers.values()}
        return cached | offered | {reading.value for reading in self.reading}

    def teardown(self) -> None:
        for reading in self.reading:
            reading.held.release()
        self.reading.clear()
        self.cache.clear()
        self.pass_time(OFFER_TIMEOUT_S)
        self.what_nobody_holds_is_free()
        for client in self.readers:
            client.close()
        self.server.close()


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
