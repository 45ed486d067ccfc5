"""Where embeddings were last seen: no encoder is asked for them, until one is not there any more."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployments.common import ray_private
from deployments.common.messages import Accepted, NotEncoded, SharedEmbedding
from deployments.common.replica_errors import TransferFailedError
from deployments.ingress import replica_client
from deployments.ingress.embedding_directory import EmbeddingDirectory
from deployments.llm.received import SlotState
from deployments.routing.affinity import Call
from deployments.telemetry.metrics import Counter
from deployments.transfer.same_host import EmbeddingUnavailableError, ShmClient, ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from encoder.item_header import MAX_IMAGE_HEADER_BYTES, ItemHeader, PromptUpdate
from tests.unit.deployments.llm.receivers import eventually, received_by, run, setting
from tests.unit.deployments.samples import IDENTITY
from tests.unit.deployments.stand_ins import HOST, IMAGE, JSON_HEAD, Accepting, Pieces, StandIns, ingress_of
from tests.unit.deployments.transfer.stored_embeddings import TIMINGS, digest, encoded, header, tokens_of


def seen(name: str, *, host: str = HOST) -> SharedEmbedding:
    return SharedEmbedding(name, "float32", (6, 8), TIMINGS, f"{host}/somewhere")


def test_the_last_used_are_remembered_and_count_as_cached_now() -> None:
    where = EmbeddingDirectory(2, clock=lambda: 123.0)
    for name in ("a", "b"):
        where.put(seen(name))
    found = where.get(HOST, "a")
    assert found is not None
    assert (found.timings.cached, found.timings.ready_at_s) == (True, 123.0)
    assert (found.digest, found.server) == ("a", f"{HOST}/somewhere")
    where.put(seen("c"))
    assert (where.get(HOST, "b"), len(where)) == (None, 2)
    where.discard(seen("a"))
    where.discard(seen("never there"))
    assert (where.get(HOST, "a"), len(where)) == (None, 1)


def test_a_large_header_counts_as_several_entries() -> None:
    """An entry with the header of a long video of vLLM's encoder takes a hundred times the memory of an image's."""
    where = EmbeddingDirectory(4)
    for name in ("a", "b"):
        where.put(seen(name))
    update = PromptUpdate.of_tokens("insert", "start", [(0, True)] * 6)
    headers = [ItemHeader("v", "video", 6, (update,), bytes(size)) for size in (2 * MAX_IMAGE_HEADER_BYTES, 20_000)]
    small, large = (dataclasses.replace(seen(name), header=one) for name, one in zip("vw", headers, strict=True))
    where.put(small)
    assert [where.get(HOST, name) is not None for name in "abv"] == [False, True, True]
    where.put(large)
    assert where.get(HOST, "w") is None
    assert len(where) == 2


def test_each_host_has_its_own() -> None:
    """Memory of one host cannot be read on another."""
    where = EmbeddingDirectory(8)
    here, there = seen("a"), seen("a", host="another")
    where.put(here)
    assert where.get("another", "a") is None
    where.put(there)
    for host in (HOST, "another"):
        found = where.get(host, "a")
        assert found is not None
        assert found.server == f"{host}/somewhere"
    where.discard(there)
    assert (where.get(HOST, "a") is None, where.get("another", "a") is None) == (False, True)


def test_a_late_report_of_an_old_location_leaves_the_new_one() -> None:
    """Two requests have the location of an encoder that has ended, and the first one's image was encoded anew."""
    where = EmbeddingDirectory(8)
    old = seen("a")
    where.put(old)
    where.discard(old)
    where.put(new := dataclasses.replace(old, server=f"{HOST}/restarted"))
    where.discard(old)
    found = where.get(HOST, "a")
    assert found is not None
    assert found.server == new.server


def test_with_no_room_nothing_is_remembered() -> None:
    where = EmbeddingDirectory(0)
    where.put(seen("a"))
    assert where.get(HOST, "a") is None


def in_turn(stand_ins: StandIns, times: int, **limits: Any) -> list[int]:
    """The status of each of so many equal requests to one ingress."""

    async def ask() -> list[int]:
        ingress = ingress_of(stand_ins, **limits)
        body = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        return [(await ingress(Request(scope, receive))).status_code for _ in range(times)]

    return asyncio.run(ask())


class Reads(Accepting):
    """Language models that read the embedding where an encoder on their host has it, and say so."""

    def accepted(self) -> Accepted:
        return Accepted((seen(self.jobs[-1].digest),))


def hosts_of(reads: Reads) -> list[str]:
    """Where encoders were called."""
    return [Call.from_session_id(label).host for label in reads.labels["encode"]]


def test_no_encoder_is_asked_for_what_a_language_model_has_read_before() -> None:
    reads = Reads()
    assert in_turn(reads, 4) == [200] * 4
    assert hosts_of(reads) == [HOST]
    assert [type(given) for (given,) in reads.given] == [Pieces, *[SharedEmbedding] * 3]
    known = reads.given[-1][0]
    assert isinstance(known, SharedEmbedding)
    assert (known.digest, known.timings.cached) == (reads.jobs[0].digest, True)


def test_headers_count_among_the_bytes_of_a_request_by_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's replicas refuse gRPC messages over 4 MiB, and a conversation may have hundreds of images."""
    by_grpc = mock.Mock(side_effect=lambda answer: answer)
    monkeypatch.setattr(replica_client, "GrpcAnswer", by_grpc)
    reads = Reads()
    assert in_turn(reads, 1) == [200]
    assert by_grpc.call_count == 1
    monkeypatch.setattr(replica_client, "MAX_GRPC_BYTES", len(reads.requests[0].body) + 100)
    assert in_turn(reads, 2) == [200] * 2
    assert by_grpc.call_count == 1


def test_switched_off_encoders_are_asked_always() -> None:
    reads = Reads()
    assert in_turn(reads, 4, embedding_directory_entries=0) == [200] * 4
    assert len(reads.jobs) == 4


def test_an_embedding_that_has_gone_is_asked_for_at_once() -> None:
    """The client sees nothing of it, and no replica counts as lost."""
    reads = Reads(Pieces(JSON_HEAD, b"{}"), Pieces(NotEncoded((0,))))
    assert in_turn(reads, 3) == [200] * 3
    assert [type(given) for (given,) in reads.given] == [Pieces, SharedEmbedding, Pieces, SharedEmbedding]
    assert len(reads.jobs) == 2
    assert not any(encoding.cancelled for encoding in reads.encodings)


def test_the_next_language_model_reads_what_the_lost_one_was_to_read() -> None:
    reads = Reads(Pieces(JSON_HEAD, b"{}"), Pieces(RayActorError()))
    assert in_turn(reads, 2) == [200] * 2
    assert [type(given) for (given,) in reads.given] == [Pieces, SharedEmbedding, SharedEmbedding]


def test_what_was_lost_is_encoded_once_more_and_not_sought_where_it_was() -> None:
    reads = Reads(Pieces(JSON_HEAD, b"{}"), Pieces(TransferFailedError("no bytes")), Pieces(JSON_HEAD, b"{}"))
    assert in_turn(reads, 2) == [200, 200]
    assert [type(given) for (given,) in reads.given] == [Pieces, SharedEmbedding, Pieces]
    encodes = [Call.from_session_id(label) for label in reads.labels["encode"]]
    assert [call.attempt for call in encodes] == [0, 1]
    assert {call.host for call in encodes} == {HOST}


def test_on_one_host_no_language_model_is_chosen_before_its_call() -> None:
    """It would not change where images are encoded, and costs a part of a millisecond."""
    reads = Reads()
    reads.run(IDENTITY)
    assert in_turn(reads, 2) == [200] * 2
    assert hosts_of(reads) == [HOST]
    assert {Call.from_session_id(label).replica for label in reads.labels["handle"]} == {""}


def test_where_no_language_model_runs_encoders_begin_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve starts none for a choice: images waited for one, and one for a call."""
    monkeypatch.setattr(ray_private, "running_replicas", lambda handle: [])
    reads = Reads()
    assert in_turn(reads, 1) == [200]
    (call,) = (Call.from_session_id(label) for label in reads.labels["handle"])
    assert (call.replica, call.host) == ("", "")
    assert hosts_of(reads) == [""]


def test_a_language_model_takes_what_it_is_told_to_lie_somewhere() -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            first = await received_by(given.receiver, image)
            assert first.locations == (image,)
            again = await received_by(given.receiver, image)  # no offer is open now, and the first holds it
            given.receiver.close(first)
            await eventually(lambda: len(given.scheduler.table._digest_by_lease) == 1)
            expected = tokens_of(encoded(EmbeddingStore(2**20))).float()
            assert torch.equal(given.loaded(image)[0], expected)
            given.receiver.close(again)
            assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, "engine_loads"] == 2

    run(scenario())


@pytest.mark.parametrize("server_has_gone", [False, True])
def test_what_has_gone_is_skipped_until_the_engine_asks(server_has_gone: bool) -> None:
    async def scenario() -> None:
        async with setting() as given:
            there, gone = given.offered(1), given.offered(2)
            given.store._offers.pop(digest(2))
            gc.collect()
            if server_has_gone:
                given.server.close()
            arrived = await received_by(given.receiver, *([gone] if server_has_gone else [there, gone]))
            assert [slot.state for slot in arrived.slots[-1:]] == [SlotState.SKIPPED]
            assert arrived.num_skipped == 1
            assert arrived.images == [*arrived.images[:-1], None], "it was not read, and has no times"
            assert (arrived.transfer_s is None) == server_has_gone
            given.receiver.close(arrived)

    run(scenario())


def test_the_server_tells_what_was_known_to_be_there() -> None:
    """So that the encoder's cache keeps what is read, though nobody asks the encoder for it."""
    store, told = EmbeddingStore(2**20), SimpleQueue[str]()
    server = ShmServer(store, on_direct_read=told.put)
    try:
        image = encoded(store, 1)
        assert store.offer(image)
        client = ShmClient(server.address)
        client.acquire(header(1)).result(10)
        assert told.empty()
        client.acquire(header(1), direct_read=True).result(10)
        assert told.get(timeout=10) == digest(1), "after the borrower has its answer"
        with pytest.raises(EmbeddingUnavailableError):
            client.acquire(header(2), direct_read=True).result(10)
        client.acquire(header(1)).result(10)  # whoever is to be told of the one before was told by now
        assert told.empty()
        client.close()
    finally:
        server.close()
