"""An encoder replica and its shared memory: what lies there is not encoded again, and its threads are watched."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import AppConfig
from deployments.common.messages import EncodedImage, ImageJob, SharedEmbedding
from deployments.common.replica_errors import OtherIdentityError
from deployments.common.throughput import InFlightTokens
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.encoder_replica.gpu.jobs import Encoded
from deployments.encoder_replica.single_flight import SingleFlight
from deployments.telemetry.metrics import Counter, Tier
from deployments.transfer import remote_sender, shared_store, unix_socket
from deployments.transfer.header import HEADER_BYTES, Header
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import Lease, ShmClient
from deployments.transfer.shared_memory import PAGE_BYTES
from deployments.transfer.unix_socket import ListenerError
from encoder.pixels.preprocess import Pixels
from tests.unit.deployments.samples import IDENTITY, png
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.test_same_host import PATIENCE_S, WIDTH, barrier, digest, encoded, eventually

HERE = "the one host"
GRID = (1, 4, 6)


class AllAdded:
    """Counters without Ray."""

    def __init__(self) -> None:
        self.added: collections.Counter[tuple[Counter, str | None]] = collections.Counter()

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        assert number > 0
        self.added[counter, next(iter(labels.values()), None)] += number


class Replica(EncoderReplica):
    """The application's own around a tower that writes how many images it has encoded."""

    def __init__(self, *, cache_bytes: int = 2**20, shared_bytes: int = 2**20) -> None:
        self.num_encoded = 0
        self._counts: Any = AllAdded()
        self.counts: AllAdded = self._counts
        self._cache = EmbeddingCache(cache_bytes)
        self.forget = lambda: setattr(self, "_cache", EmbeddingCache(cache_bytes))
        settings = {"model": "none", "encoder_replica": {"embedding_shm_bytes": shared_bytes}}
        self.store = self._make_store(AppConfig.model_validate(settings))
        self._server = self.server = self._make_server(self.store)
        self._remote: Any = None
        self._host, self._name = HERE, "a"
        self._single_flight, self._in_flight = SingleFlight(), InFlightTokens()
        self._times: Any = SimpleNamespace(observe=lambda *_: None)
        self._worker: Any = SimpleNamespace(
            identity=IDENTITY, tokens_per_s=0.0, fault=None, is_alive=True, stop=lambda: None
        )
        self._decoders: Any = SimpleNamespace(decode=self._pixels, stop=lambda: None)
        self._has_batching_task = False

    async def _pixels(self, *_: object) -> Pixels:
        return Pixels(np.zeros((3, 4, 4), np.uint8), GRID)

    async def _hand_off(self, _: object) -> asyncio.Future[Encoded]:
        self.num_encoded += 1
        tokens = self._allocate(self.store, 6, WIDTH, torch.float32)
        assert tokens is not None
        encoded: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        encoded.set_result(Encoded(tokens.fill_(self.num_encoded), 0.0, 0.0))
        return encoded

    def close(self) -> None:
        self.server.close()
        if self._remote is not None:
            self._remote.close()

    def answer(self, number: int = 1, *, reader_hosts: str = HERE, identity: str = IDENTITY.fingerprint) -> Any:
        job = ImageJob(png(), None, digest(number), identity, (4, 4), 6, reader_hosts=(reader_hosts,))
        return asyncio.run(self.encode(job))


@pytest.fixture
def replica() -> Iterator[Replica]:
    with closing(Replica()) as replica:
        yield replica


def acquire(client: ShmClient, image: SharedEmbedding) -> Lease:
    return client.acquire(Header.of(image)).result(PATIENCE_S)


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_what_a_reader_holds_is_not_encoded_again(cache_bytes: int) -> None:
    """The cache had dropped an image that a language model still held; a second request had it encoded again, beside
    the first one's copy."""
    replica = Replica(cache_bytes=cache_bytes)
    with closing(replica), closing(ShmClient(replica.server.address)) as client:
        first = acquire(client, replica.answer())
        replica.forget()
        second = acquire(client, replica.answer())
        assert replica.num_encoded == 1
        assert replica.counts.added[Counter.CACHE_HITS, Tier.REPLICA.value] == 1
        assert replica.counts.added[Counter.CACHE_MISSES, None] == 1
        assert first.offset == second.offset
        first.release()
        barrier(client)
        replica.forget()
        replica.answer(2)
        assert torch.equal(second.tensor(), torch.full((6, WIDTH), 1.0))
        second.release()
        barrier(client)
        replica.answer(1)
        assert replica.num_encoded == 3, "nobody had it any more"


def test_a_job_made_for_other_weights_is_refused_and_not_encoded(replica: Replica) -> None:
    """Its digest was computed with the other encoder's identity: the embedding would be cached under a wrong key."""
    with pytest.raises(OtherIdentityError, match="other weights or numerics"):
        replica.answer(identity="other weights")
    assert replica.num_encoded == 0
    assert not replica.counts.added


def test_offers_that_make_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "MIN_OFFER_AGE_S", 0.0)
    with closing(Replica(cache_bytes=0, shared_bytes=2 * (HEADER_BYTES + PAGE_BYTES))) as replica:
        images = [replica.answer(number) for number in (1, 2, 3)]
        assert [type(image) for image in images] == [SharedEmbedding] * 3
        assert replica.counts.added[Counter.EMBEDDINGS_EVICTED_UNREAD, None] == 2, "those that waited"
        replica.store.expire_offers()
        assert replica.store.is_offered(digest(3)), "it is kept for as long as its request may take"


def test_what_lies_there_is_sent_through_the_object_store_too(replica: Replica) -> None:
    with closing(ShmClient(replica.server.address)) as client:
        acquire(client, replica.answer())
        replica.forget()
        image = replica.answer(reader_hosts="elsewhere")
        assert isinstance(image, EncodedImage)
        assert image.timings.cached
        assert (image.bits == 1.0).all()
        assert replica.num_encoded == 1
        assert digest(1) in replica._cache, "it is asked for again"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_lending_thread_is_told_by_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica passed its check, and nobody could borrow from it."""

    def die(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(unix_socket, "accept", die)
    with closing(Replica()) as replica:
        replica.server._listener._thread.join(PATIENCE_S)
        with pytest.raises(RuntimeError, match="serves embeddings to this host has died"):
            asyncio.run(replica.check_health())


def test_a_server_that_was_closed_passes_the_health_check(replica: Replica) -> None:
    asyncio.run(replica.check_health())
    replica.server.close()
    replica.server._listener._thread.join(PATIENCE_S)
    asyncio.run(replica.check_health())


class FailingMemory(FakeMemory):
    """The first look at the network fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(FakeNetwork())
        self.errors = [error]

    def get_notifications(self) -> list[bytes]:
        if self.errors:
            raise self.errors.pop()
        return super().get_notifications()


def publishes_remotely(replica: Replica, memory: FakeMemory) -> RemoteSender:
    replica._remote = sender = RemoteSender(replica.store, memory, on_error=replica._count_listener_error)
    return sender


def test_the_thread_for_other_hosts_survives_an_error(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended, and nothing that was lent to other hosts was freed any more."""
    monkeypatch.setattr(remote_sender, "ERROR_PAUSE_S", 0.0)
    memory = FailingMemory(RuntimeError("of the network"))
    sender = publishes_remotely(replica, memory)
    image = sender.publish(encoded(replica.store))
    assert image is not None
    assert image.remote is not None
    eventually(lambda: replica.counts.added[Counter.LISTENER_ERRORS, ListenerError.MESSAGE.value] == 1)
    memory.network.notified[memory.name].append(image.remote.lease)
    eventually(lambda: len(sender) == 0)
    asyncio.run(replica.check_health())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_its_death_is_told_by_the_health_check(replica: Replica) -> None:
    sender = publishes_remotely(replica, FailingMemory(SystemExit()))
    assert sender.publish(encoded(replica.store)) is not None
    sender._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="serves embeddings to other hosts has died"):
        asyncio.run(replica.check_health())
