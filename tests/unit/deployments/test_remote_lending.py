"""Embeddings read from another host's memory: whole or not at all, bounded, and given back at both ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch

from deployments.embedding_header import HEADER_BYTES, Header, WrongEmbeddingError
from deployments.embedding_shelf import EmbeddingShelf
from deployments.landing import Landed, Landing
from deployments.lending import GoneError
from deployments.remote_lending import LENT_S, RemoteLender
from deployments.wire import SharedEmbedding
from tests.unit.deployments.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.test_lending import PATIENCE_S, WIDTH, encoded, eventually

SHORT_S = 0.05


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf() -> EmbeddingShelf:
    return EmbeddingShelf(2**20)


@pytest.fixture
def lender(shelf: EmbeddingShelf, network: FakeNetwork, clock: Clock) -> Iterator[RemoteLender]:
    with closing(RemoteLender(shelf, FakeMemory(network), clock=clock)) as lender:
        yield lender


@pytest.fixture
def landing(network: FakeNetwork) -> Iterator[Landing]:
    with closing(Landing(FakeMemory(network), 4 * HEADER_BYTES, patience_s=PATIENCE_S)) as landing:
        yield landing


def lent(lender: RemoteLender, shelf: EmbeddingShelf, number: int = 1) -> SharedEmbedding:
    found = lender.lend(encoded(shelf, number))
    assert found is not None
    return found


def tensor(image: SharedEmbedding, landed: Landed) -> torch.Tensor:
    return landed.tensor(landed.start, Header(image.digest, image.dtype, image.shape, image.grid_thw))


def is_free(holder: EmbeddingShelf | Landing) -> bool:
    gc.collect()
    return holder.arena.free_bytes == holder.arena.num_bytes


def under_way(landing: Landing) -> bool:
    return any(pull.reading is not None for pull in landing._pulls)


def test_an_embedding_arrives_bit_by_bit_and_both_ends_give_back(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf
) -> None:
    image = lent(lender, shelf)
    landed = landing.fetch(image).result(PATIENCE_S)
    expected = encoded(EmbeddingShelf(2**20)).unpack(width=WIDTH, merge_size=2)
    assert torch.equal(tensor(image, landed), expected)
    eventually(lambda: len(lender) == 0 and is_free(shelf))
    kept = tensor(image, landed)
    landed.release(image.digest)
    with pytest.raises(WrongEmbeddingError, match="given back"):
        tensor(image, landed)
    assert not is_free(landing), "vLLM may still read it"
    del kept
    eventually(lambda: is_free(landing))


def test_what_nobody_reads_is_lent_for_a_bounded_time(
    lender: RemoteLender, shelf: EmbeddingShelf, clock: Clock
) -> None:
    image = lent(lender, shelf)
    clock.now = LENT_S - 1
    lent(lender, shelf, 2)
    assert len(lender) == 2
    clock.now = LENT_S
    eventually(lambda: len(lender) == 1)
    assert not is_free(shelf)
    clock.now = 2 * LENT_S
    eventually(lambda: is_free(shelf))
    assert image.remote is not None


def test_what_does_not_lie_on_the_shelf_is_not_lent(lender: RemoteLender, shelf: EmbeddingShelf) -> None:
    assert lender.lend(encoded(EmbeddingShelf(2**20))) is None
    assert len(lender) == 0


def test_another_embedding_in_its_place_is_noticed(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, clock: Clock
) -> None:
    image = lent(lender, shelf, 1)
    clock.now = LENT_S
    eventually(lambda: is_free(shelf))
    lent(lender, shelf, 2)
    with pytest.raises(GoneError, match="embedding of 000000000000"):
        landing.fetch(image).result(PATIENCE_S)
    eventually(lambda: is_free(landing))


@pytest.mark.parametrize("read", [1, 2])
def test_an_embedding_that_changes_while_it_is_read_is_not_taken(
    read: int, lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    image = lent(lender, shelf)
    reads = []

    def replaced() -> None:
        reads.append(1)
        if len(reads) == read:
            shelf.arena.write(0, bytes(64))  # as when its memory is given to the next one

    network.between = replaced
    with pytest.raises(GoneError, match="no embedding where"):
        landing.fetch(image).result(PATIENCE_S)
    eventually(lambda: is_free(landing))


def test_an_encoder_that_is_gone_is_told_and_connected_to_anew(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    image = lent(lender, shelf)
    assert image.remote is not None
    network.gone.add(image.remote.introduction)
    with pytest.raises(GoneError, match="has gone"):
        landing.fetch(image).result(PATIENCE_S)
    assert isinstance(landing._memory, FakeMemory)
    assert landing._memory.forgotten == [image.remote.introduction]
    network.gone.clear()
    assert landing.fetch(image).result(PATIENCE_S).start == 0


def test_a_read_that_does_not_end_is_given_up_and_its_memory_kept_until_it_has(
    lender: RemoteLender, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    """NIXL releases a read that is under way, and goes on writing."""
    with closing(Landing(FakeMemory(network), 4 * HEADER_BYTES, patience_s=SHORT_S)) as landing:
        network.stuck = True
        with pytest.raises(GoneError, match=r"no bytes .* in 0.05 s"):
            landing.fetch(lent(lender, shelf)).result(PATIENCE_S)
        assert not is_free(landing)
        network.stuck = False
        eventually(lambda: is_free(landing))


def test_what_is_in_flight_is_bounded_and_the_next_waits(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf
) -> None:
    images = [lent(lender, shelf, number) for number in (1, 2, 3)]
    first, second, third = map(landing.fetch, images)
    held = [first.result(PATIENCE_S), second.result(PATIENCE_S)]
    assert landing.arena.free_bytes == 0
    assert not third.done()
    held.pop().release("")
    del first, second
    third.result(PATIENCE_S)
    assert landing.arena.free_bytes == 0


def test_without_room_in_time_it_is_given_up(lender: RemoteLender, shelf: EmbeddingShelf, network: FakeNetwork) -> None:
    with closing(Landing(FakeMemory(network), 2 * HEADER_BYTES, patience_s=SHORT_S)) as landing:
        kept = landing.fetch(lent(lender, shelf)).result(PATIENCE_S)
        with pytest.raises(GoneError, match=r"no room for an embedding of \d+ bytes"):
            landing.fetch(lent(lender, shelf, 2)).result(PATIENCE_S)
        assert kept.start == 0


def test_what_could_never_fit_is_refused_at_once(lender: RemoteLender, shelf: EmbeddingShelf) -> None:
    with (
        closing(Landing(FakeMemory(FakeNetwork()), HEADER_BYTES)) as landing,
        pytest.raises(GoneError, match=r"embedding of \d+ bytes, there is room for 4096"),
    ):
        landing.fetch(lent(lender, shelf)).result(0)


def test_who_leaves_while_it_is_read_holds_nothing(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    network.stuck = True
    coming: Future[Landed] = landing.fetch(lent(lender, shelf))
    eventually(lambda: under_way(landing))
    assert coming.cancel()
    network.stuck = False
    eventually(lambda: is_free(landing))


def test_one_that_ends_fails_what_it_was_reading(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    network.stuck = True
    image = lent(lender, shelf)
    coming = landing.fetch(image)
    eventually(lambda: under_way(landing))
    landing.close()
    with pytest.raises(GoneError, match="ends"):
        coming.result(PATIENCE_S)
    assert isinstance(landing._memory, FakeMemory)
    assert image.remote is not None
    assert landing._memory.forgotten == [image.remote.introduction]


def test_an_error_of_another_kind_does_not_end_the_reading(
    lender: RemoteLender, landing: Landing, shelf: EmbeddingShelf, network: FakeNetwork
) -> None:
    def fail() -> None:
        raise TypeError("an argument that NIXL does not take")

    network.between = fail
    with pytest.raises(GoneError, match="does not take"):
        landing.fetch(lent(lender, shelf)).result(PATIENCE_S)
    network.between = lambda: None
    landing.fetch(lent(lender, shelf)).result(PATIENCE_S)
