"""An encoder replica and its shared memory: what lies there is not encoded again, and its threads are watched."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import AppConfig
from deployments.common.messages import NOT_STORED, ChunkOfVideo, EncodedImage, ImageJob, SharedEmbedding, StoredFile
from deployments.common.replica_errors import OtherIdentityError, QueueFullError
from deployments.common.throughput import InFlightTokens
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.encoder_replica.gpu.jobs import Encoded
from deployments.encoder_replica.single_flight import SingleFlight
from deployments.routing.affinity import Call
from deployments.scaling.encoder_scaler import RECEIVED_TOKENS
from deployments.telemetry.metrics import Counter
from deployments.transfer import remote_sender, shared_store, unix_socket
from deployments.transfer.header import HEADER_BYTES, Header
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import Lease, ShmClient
from deployments.transfer.shared_memory import PAGE_BYTES
from deployments.transfer.tcp_client import TcpClients
from encoder.pixels.preprocess import Pixels
from encoder.video.bounds import VideoBounds
from encoder.video.size import VideoChunk
from tests.unit.deployments.samples import IDENTITY, png
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.stored_embeddings import (
    PATIENCE_S,
    TIMINGS,
    WIDTH,
    barrier,
    digest,
    encoded,
    eventually,
    read,
)

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
        config = AppConfig.model_validate(settings)
        self.store = self._make_store(config)
        self._server = self.server = self._make_server(self.store)
        self._tcp = self.tcp = self._make_tcp_server(self.store, config)
        self._remote: Any = None
        self._name = "a"
        self._single_flight, self._in_flight = SingleFlight(), InFlightTokens()
        self._times: Any = SimpleNamespace(observe=lambda *_: None)
        self._worker: Any = SimpleNamespace(
            identity=IDENTITY, tokens_per_s=0.0, fault=None, is_alive=True, stop=lambda: None
        )
        self._decoders: Any = SimpleNamespace(
            decode=self._pixels,
            decode_chunk=self._pixels,
            workers=SimpleNamespace(stop=lambda: None, can_start=True),
        )
        self._video_bounds = VideoBounds()
        self._has_batching_task = False

    async def _pixels(self, *_: object) -> Pixels:
        return Pixels(np.zeros((3, 4, 4), np.uint8), GRID)

    async def _hand_off(self, _: object) -> asyncio.Future[Encoded]:
        self.num_encoded += 1
        tokens = self._allocate(self.store, 6, WIDTH, torch.float32)
        if tokens is None:
            tokens = torch.empty(6, WIDTH)
        encoded: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        encoded.set_result(Encoded(tokens.fill_(self.num_encoded), 0.0, 0.0))
        return encoded

    def close(self) -> None:
        self.server.close()
        self.tcp.close()
        if self._remote is not None:
            self._remote.close()

    def answer(self, number: int = 1, *, identity: str = IDENTITY.fingerprint, **fields: Any) -> Any:
        job = ImageJob(png(), None, digest(number), identity, (4, 4), 6, **fields)
        return asyncio.run(self.encode(job))


@pytest.fixture
def replica() -> Iterator[Replica]:
    with closing(Replica()) as replica:
        yield replica


def acquire(client: ShmClient, image: SharedEmbedding) -> Lease:
    return client.acquire(Header.of(image)).result(PATIENCE_S)


def test_chunks_of_videos_count_by_their_medium_and_as_tokens_of_the_load(replica: Replica) -> None:
    chunk = ChunkOfVideo("v" * 64, (0, 1), VideoChunk(0, 2, GRID, 6), StoredFile(b"file"))
    replica.answer(1)
    replica.answer(2, modality="video", chunk=chunk)
    for medium in ("image", "video"):
        assert replica.counts.added[Counter.IMAGES_ENCODED, medium] == 1
    assert replica.record_autoscaling_stats()[RECEIVED_TOKENS] == 6 + 6


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
        assert replica.counts.added[Counter.CACHE_HITS, "replica"] == 1
        assert replica.counts.added[Counter.CACHE_MISSES, None] == 1
        assert first.offset == second.offset
        first.release()
        barrier(client)
        replica.forget()
        replica.answer(2)
        assert torch.equal(read(second), torch.full((6, WIDTH), 1.0))
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


def test_an_embedding_larger_than_shared_memory_displaces_nothing() -> None:
    """Each emptied the cache, and no room that was made was enough for it."""
    pages = 4 * PAGE_BYTES
    with closing(Replica(shared_bytes=pages)) as replica:
        replica.answer(1)
        assert replica._allocate(replica.store, pages // (4 * WIDTH), WIDTH, torch.float32) is None
        assert digest(1) in replica._cache
        assert replica.store.is_offered(digest(1))
        largest = (pages - HEADER_BYTES) // (4 * WIDTH)
        assert replica._allocate(replica.store, largest, WIDTH, torch.float32) is None, "the first one is offered"
        assert digest(1) in replica._cache
        private = EncodedImage.pack(torch.zeros(6, WIDTH), digest(2), TIMINGS)
        replica._cache.put(digest(2), private, private.num_bytes)
        assert replica._allocate(replica.store, largest, WIDTH, torch.float32) is None
        replica.store.acquire(digest(1))
        assert replica._allocate(replica.store, largest, WIDTH, torch.float32) is not None
        assert (digest(1) in replica._cache, digest(2) in replica._cache) == (False, True), "it takes no room there"


@pytest.mark.parametrize("by_rdma", [False, True])
def test_what_a_reader_holds_stays_in_the_cache_when_room_is_needed(by_rdma: bool) -> None:
    """Its eviction frees nothing: the cache was emptied without making room."""
    pages = 4 * PAGE_BYTES
    largest = (pages - HEADER_BYTES) // (4 * WIDTH)
    with closing(Replica(shared_bytes=pages)) as replica:
        replica.answer(1)
        held = replica.store.acquire(digest(1))
        assert held is not None
        if by_rdma:
            assert replica.store.offer(held, reader="reader")
            held = None
        assert replica._allocate(replica.store, largest, WIDTH, torch.float32) is None
        assert digest(1) in replica._cache
        held = None
        replica.store.end_offer("reader")
        assert replica._allocate(replica.store, largest, WIDTH, torch.float32) is not None
        assert digest(1) not in replica._cache


def test_every_answer_says_where_any_reader_finds_it(replica: Replica) -> None:
    ticket = replica.answer()
    assert (ticket.server, ticket.tcp, ticket.remote) == (replica.server.address, replica.tcp.address, None)
    publishes_remotely(replica, FakeMemory(FakeNetwork()))
    ticket = replica.answer()
    assert (ticket.server, ticket.tcp) == (replica.server.address, replica.tcp.address)
    assert ticket.remote is not None
    assert not replica.counts.added[Counter.EMBEDDING_SHM_FALLBACKS, None]


def test_without_room_in_shared_memory_embeddings_are_read_by_tcp_and_bounded() -> None:
    shared_bytes = HEADER_BYTES + PAGE_BYTES
    with closing(Replica(cache_bytes=0, shared_bytes=shared_bytes)) as replica:
        replica.answer(1)
        tickets = [replica.answer(number) for number in range(2, 2 + shared_bytes // (6 * WIDTH * 4))]
        assert {ticket.server for ticket in tickets} == {NOT_STORED}
        assert {ticket.tcp for ticket in tickets} == {replica.tcp.address}
        assert replica.counts.added[Counter.EMBEDDING_SHM_FALLBACKS, None] == len(tickets)
        with pytest.raises(QueueFullError, match="unread embeddings"):
            replica.answer(100)
        clients = TcpClients(replica.tcp._secret, ReceiveBuffer(2**20))
        found = clients.fetch(tickets[0].tcp, Header.of(tickets[0])).result(PATIENCE_S)
        assert (read(found) == 2.0).all()
        clients.close()
        assert replica.answer(100).server == NOT_STORED


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_for_other_hosts_is_told_by_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: object) -> None:
        raise SystemExit

    def wait(_: object) -> None:
        time.sleep(PATIENCE_S)
        raise OSError

    monkeypatch.setattr(socket.socket, "accept", die)
    monkeypatch.setattr(unix_socket, "accept", wait)
    with closing(Replica()) as replica:
        replica.tcp._listener._thread.join(PATIENCE_S)
        with pytest.raises(RuntimeError, match="serves embeddings to other hosts has died"):
            asyncio.run(replica.check_health())


def test_decoders_that_cannot_be_started_are_told_by_the_health_check(replica: Replica) -> None:
    """Their images were sent there again and again, since the replica had other images of their clients."""
    asyncio.run(replica.check_health())
    replica._decoders.workers.can_start = False
    with pytest.raises(RuntimeError, match="no process can be started that decodes files"):
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
    replica._remote = sender = RemoteSender(replica.store, memory)
    return sender


def test_the_thread_for_other_hosts_survives_an_error(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended, and nothing that was lent to other hosts was freed any more."""
    monkeypatch.setattr(remote_sender, "ERROR_PAUSE_S", 0.0)
    memory = FailingMemory(RuntimeError("of the network"))
    sender = publishes_remotely(replica, memory)
    location = sender.publish(encoded(replica.store))
    assert location is not None
    eventually(lambda: caplog.messages == ["notifications of readers on other hosts could not be read"])
    memory.network.notified[memory.name].append(location.lease)
    eventually(lambda: not sender._leases)
    asyncio.run(replica.check_health())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_its_death_is_told_by_the_health_check(replica: Replica) -> None:
    sender = publishes_remotely(replica, FailingMemory(SystemExit()))
    assert sender.publish(encoded(replica.store)) is not None
    sender._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="serves embeddings to other hosts has died"):
        asyncio.run(replica.check_health())


def test_calls_are_refused_where_too_much_work_is_before_them() -> None:
    """`test_busy.py` has the rule. A cached image and one that is being encoded are never refused, nor is a call that
    says so."""
    with closing(Replica()) as replica:
        replica._worker.tokens_per_s = 1000.0
        replica.answer(1)
        call = Call(digest(2), 10, cost=10, refusable=True)

        async def scenario() -> None:
            with replica._in_flight.job(61):
                assert replica._is_too_busy(call.to_session_id())
                for other in (
                    dataclasses.replace(call, refusable=False),
                    dataclasses.replace(call, key=digest(1)),
                    dataclasses.replace(call, key=digest(3)),
                ):
                    never: Any = asyncio.Event().wait
                    encoding = asyncio.ensure_future(replica._single_flight.run(digest(3), never))
                    await asyncio.sleep(0)
                    assert not replica._is_too_busy(other.to_session_id())
                    encoding.cancel()
            with replica._in_flight.job(60):
                assert not replica._is_too_busy(call.to_session_id())
            assert not replica._is_too_busy("")

        asyncio.run(scenario())
