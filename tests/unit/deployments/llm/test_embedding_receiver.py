"""Embeddings on their way into an engine whose scheduler and workers are the application's own, without vLLM's.

One file, since every test follows an embedding through the same receiver and engine (`receivers.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
import torch

from deployments.common.messages import ImageRefused
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.embedding_receiver import LinkLostError
from deployments.llm.received import EmbeddingMismatchError, ReceivedEmbeddings, SlotState, TransferPath
from deployments.telemetry.clocks import MAX_DURATION_S
from deployments.telemetry.metrics import Counter, Histogram
from deployments.transfer import unix_socket
from deployments.transfer.header import HEADER_BYTES
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.same_host import ShmClient, ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import TcpError
from deployments.vllm.connector.link import Loaded
from deployments.vllm.connector.worker_memory import WorkerMemory
from tests.unit.deployments.llm.receivers import (
    MIB,
    RaysCounts,
    eventually,
    received_by,
    run,
    setting,
)
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.stored_embeddings import WIDTH, digest, encoded, tokens_of


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_engine_loads_by_itself(num_workers: int) -> None:
    async def scenario() -> None:
        async with setting(num_workers=num_workers) as given:
            images = [given.offered(1), given.offered(2)]
            arrived = await received_by(given.receiver, *at_once(*images))
            table = given.scheduler.table
            await eventually(lambda: len(table._digest_by_lease) == 2)
            assert table.reserve("request", [image.digest for image in images])
            for image, expected in zip(images, (encoded(EmbeddingStore(2**20), n) for n in (1, 2)), strict=True):
                lease = table.plan_load(image.digest)
                assert lease is not None
                for memory, worker in zip(given.memories, given.workers, strict=True):
                    loaded = memory.load(lease, torch.float32)
                    assert torch.equal(loaded, tokens_of(expected).float())
                    worker.report_loaded(Loaded(lease.name, loaded.nbytes, 0.005))
            given.receiver.close(arrived)
            await eventually(lambda: given.receiver.num_loaded == 2 * num_workers)
            assert len(given.receiver._granted) == 2, "the request runs still"
            given.scheduler.finish_request("request")
            await eventually(lambda: len(given.receiver._granted) == 0 and given.nothing_is_lent)
            assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.ENGINE.value] == 2
            assert given.counts.added[Counter.EMBEDDING_BYTES_LOADED, None] == num_workers * 2 * 6 * WIDTH * 4
            assert given.counts.observed[Histogram.EMBEDDING_LOAD_SECONDS] == [0.005] * num_workers * 2

    run(scenario())


def test_a_lease_ends_when_the_last_worker_has_loaded_what_it_was_told_to() -> None:
    """A step may be scheduled and not yet run when its request is aborted: its bytes must stay until then."""

    async def scenario() -> None:
        async with setting(num_workers=2) as given:
            image = given.offered()
            arrived = await received_by(given.receiver, *at_once(image))
            table = given.scheduler.table
            await eventually(lambda: table.reserve("request", [image.digest]) == 1)
            lease = table.plan_load(image.digest)
            assert lease is not None
            given.receiver.close(arrived)
            given.scheduler.finish_request("request")
            await eventually(lambda: len(table._digest_by_lease) == 0 or not table.has(image.digest))
            given.workers[0].report_loaded(Loaded(lease.name, 1, 0.0))
            await eventually(lambda: given.receiver.num_loaded == 1)
            assert len(given.receiver._granted) == 1
            assert not given.nothing_is_lent
            given.workers[1].report_loaded(Loaded(lease.name, 0, 0.0))  # it had the embedding already
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_of_another_host_that_differs_changes_timing_figures_alone(ahead_s: float) -> None:
    """The clock of an encoder's or an ingress' host. Where it was ahead, the time of a load came out below 0, Ray's
    counter refused that, and the thread that listens to the worker ended: no lease ended any more, no memory was mapped
    any more, and the next encoder's embedding ended the engine."""

    async def scenario() -> None:
        async with setting(counts=RaysCounts()) as given:
            table = given.scheduler.table
            for number in (1, 2):
                image = given.offered(number)
                timings = dataclasses.replace(image.timings, ready_at_s=time.time() + ahead_s)
                arrived = await received_by(given.receiver, *at_once(dataclasses.replace(image, timings=timings)))
                await eventually(lambda digest=image.digest: table.reserve("request", [digest]) == 1)  # type: ignore[misc]
                lease = table.plan_load(image.digest)
                assert lease is not None
                loaded = given.memories[0].load(lease, torch.float32)
                given.workers[0].report_loaded(Loaded(lease.name, loaded.nbytes, time.time() - lease.ready_at_s))
                given.scheduler.finish_request("request")
                given.receiver.close(arrived)
                await eventually(lambda: len(given.receiver._granted) == 0)
                assert arrived.transfer_s is not None
                assert 0 <= arrived.transfer_s <= MAX_DURATION_S
            await eventually(lambda: given.nothing_is_lent)
            await eventually(lambda: given.receiver.num_loaded == 2)
            reason = "ahead" if ahead_s > 0 else "behind"
            await eventually(lambda: given.counts.added[Counter.DURATIONS_CLAMPED, reason] == 4)  # transfers, loads
            assert all(0 <= s <= MAX_DURATION_S for s in given.counts.observed[Histogram.EMBEDDING_LOAD_SECONDS])

    run(scenario())


def test_what_comes_from_another_host_is_loaded_like_the_others() -> None:
    """Embeddings of one request come by any path; one refused image does not hold up the others."""

    async def scenario() -> None:
        async with setting() as given:
            shared, far = given.offered(1), given.offered(2, far=True)
            arrived = await received_by(given.receiver, *at_once(shared, far, ImageRefused("truncated")))
            assert [slot.state for slot in arrived.slots] == [SlotState.GRANTED] * 2 + [SlotState.REJECTED]
            await eventually(lambda: len(given.scheduler.table._digest_by_lease) == 2)
            for number, found in enumerate(given.loaded(shared, far), 1):
                assert torch.equal(found, tokens_of(encoded(EmbeddingStore(MIB), number)).float())
            assert arrived.locations == (shared, far, None), "the next one on its host need not call an encoder"
            given.receiver.close(arrived)
            await eventually(lambda: len(given.receiver._granted) == 0 and given.nothing_is_lent)
            assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.ENGINE.value] == 1
            assert given.counts.added[Counter.EMBEDDINGS_RECEIVED, TransferPath.TCP.value] == 1
            assert given.counts.added[Counter.EMBEDDING_BYTES_RECEIVED, TransferPath.TCP.value] == far.num_bytes
            assert arrived.path is TransferPath.TCP

    run(scenario())


def test_an_embedding_of_another_host_is_granted_before_the_others_are_encoded() -> None:
    """The engine begins with it: early prefill."""

    async def scenario() -> None:
        async with setting() as given:
            far, coming = given.offered(1, far=True), asyncio.get_running_loop().create_future()
            received = ReceivedEmbeddings()
            receiving = asyncio.create_task(given.receiver.receive([*at_once(far), coming], [(6, WIDTH)] * 2, received))
            table = given.scheduler.table
            await eventually(lambda: table.reserve("request", [far.digest, digest(2)]) == 1)
            assert not receiving.done()
            coming.set_result(given.offered(2, far=True))
            await receiving
            await eventually(lambda: table.reserve("request", [far.digest, digest(2)]) == 2)
            given.receiver.close(received)

    run(scenario())


def test_what_is_known_to_be_on_another_host_is_read_from_there() -> None:
    async def scenario() -> None:
        async with setting() as given:
            far = given.offered(far=True)
            arrived = await received_by(given.receiver, far)
            assert arrived.path is TransferPath.TCP
            assert given.store.is_offered(far.digest), "the offer is another reader's"
            given.receiver.close(arrived)
            given.store._offers.clear()
            await eventually(lambda: given.nothing_is_lent)
            skipped = await received_by(given.receiver, far)
            assert [slot.state for slot in skipped.slots] == [SlotState.SKIPPED]

    run(scenario())


def test_what_comes_from_another_host_waits_for_room() -> None:
    """A request with more embeddings than the buffer holds at once, and one with an embedding that never fits."""

    async def scenario() -> None:
        buffer = ReceiveBuffer(2 * HEADER_BYTES)
        async with setting(receive_buffer=buffer) as given:
            one, two = given.offered(1, far=True), given.offered(2, far=True)
            first = await received_by(given.receiver, *at_once(one))
            second = asyncio.create_task(received_by(given.receiver, *at_once(two)))
            await asyncio.sleep(0.05)
            assert not second.done()
            given.receiver.close(first)
            await eventually(
                lambda: len(given.scheduler.table._digest_by_lease) == 1 and given.scheduler.table.has(two.digest)
            )
            (found,) = given.loaded(two)
            assert torch.equal(found, tokens_of(encoded(EmbeddingStore(MIB), 2)).float())
            given.receiver.close(await second)
            large = dataclasses.replace(given.offered(3, far=True), shape=(HEADER_BYTES, 4))
            received = ReceivedEmbeddings()
            with pytest.raises(TransferFailedError, match="does not fit the buffer"):
                await given.receiver.receive(at_once(large), [(HEADER_BYTES, 4)], received)

    run(scenario())


def test_a_buffer_that_stays_full_fails_the_request() -> None:
    async def scenario() -> None:
        buffer = ReceiveBuffer(2 * HEADER_BYTES, timeout_s=1.0)
        async with setting(receive_buffer=buffer) as given:
            one, two = given.offered(1, far=True), given.offered(2, far=True)
            first = await received_by(given.receiver, *at_once(one))
            with pytest.raises(TransferFailedError, match="no room"):
                await received_by(given.receiver, *at_once(two))
            given.receiver.close(first)
            given.receiver.close(await received_by(given.receiver, *at_once(two)))

    run(scenario())


def test_errors_of_tcp_are_counted_and_fail_the_request() -> None:
    async def scenario() -> None:
        async with setting() as given:
            far = given.offered(far=True)
            given.tcp.close()
            with pytest.raises(TransferFailedError, match="no embedding from the encoder at"):
                await received_by(given.receiver, *at_once(far))
            assert given.counts.added[Counter.TCP_ERRORS, TcpError.CONNECTION.value] == 1

    run(scenario())


def test_an_embedding_that_is_gone_fails_the_request_and_gives_the_others_back() -> None:
    async def scenario() -> None:
        async with setting() as given:
            there, gone = given.offered(1), given.offered(2)
            given.store._offers.clear()  # nobody refers to the second one now
            given.store.offer(encoded(given.store, 1))
            with pytest.raises(TransferFailedError):
                await received_by(given.receiver, *at_once(there, gone))
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_a_bad_message_of_an_encoder_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with setting() as given:
            await received_by(given.receiver, *at_once(given.offered(1)))
            (connection,) = given.server._listener._connections
            unix_socket.send(connection, {"lease": 999, "start": 0})
            arrived = await received_by(given.receiver, *at_once(given.offered(2)))
            assert [slot.lease is not None for slot in arrived.slots] == [True]
            assert caplog.messages == ["the handling of a message failed"]

    run(scenario())


def test_an_encoder_that_is_gone_fails_the_request_and_is_forgotten() -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            arrived = await received_by(given.receiver, *at_once(image))
            given.server.close()
            given.tcp.close()
            given.receiver.unmap_dead_peers()
            assert given.memories[0]._mapped, "a lease is open"
            given.receiver.close(arrived)
            await eventually(lambda: len(given.receiver._granted) == 0)
            with pytest.raises(TransferFailedError):
                await received_by(given.receiver, *at_once(image))

            def forgotten() -> bool:
                given.receiver.unmap_dead_peers()
                return not given.memories[0]._mapped

            await eventually(forgotten)
            with pytest.raises(TransferFailedError, match="Connection refused"):
                await received_by(given.receiver, *at_once(image))
            assert given.counts.added[Counter.EMBEDDING_SHM_FALLBACKS, None] == 0, "nothing was read by TCP"

    run(scenario())


def test_memory_that_is_held_stays_mapped_before_the_engine_has_a_lease() -> None:
    """A request holds an image of one encoder and waits for another encoder's when the first encoder ends. The health
    check unmapped the memory, since it counted leases, and the engine ended at the load that followed."""

    async def scenario() -> None:
        async with setting() as given:
            other_store = EmbeddingStore(2**20)
            other_server = ShmServer(other_store)
            second = encoded(other_store, 2)
            assert other_store.offer(second)
            first, second_is_encoded = given.offered(1), asyncio.get_running_loop().create_future()
            arrived = ReceivedEmbeddings()
            arriving = asyncio.create_task(
                given.receiver.receive([*at_once(first), second_is_encoded], [(6, WIDTH)] * 2, arrived)
            )
            await eventually(lambda: [slot.lease is not None for slot in arrived.slots] == [True, False])
            given.server.close()
            client = given.receiver._peers[first.server].result().client
            assert isinstance(client, ShmClient)
            await eventually(lambda: not client.is_alive)
            given.receiver.unmap_dead_peers()
            second_is_encoded.set_result(second.to_shared(other_server.address))
            await arriving  # the worker maps the second server's memory after it has forgotten the first server's
            table = given.scheduler.table
            await eventually(lambda: table.reserve("request", [first.digest, second.digest]) == 2)
            lease = table.plan_load(first.digest)
            assert lease is not None
            loaded = given.memories[0].load(lease, torch.float32)
            expected = tokens_of(encoded(EmbeddingStore(2**20), 1)).float()
            assert torch.equal(loaded, expected)
            given.receiver.close(arrived)
            other_server.close()

    run(scenario())


def test_an_engine_that_has_gone_holds_nothing() -> None:
    async def scenario() -> None:
        async with setting() as given:
            arrived = await received_by(given.receiver, *at_once(given.offered()))
            given.receiver.check()
            given.scheduler.close()
            await eventually(lambda: given.receiver.link._scheduler is None)
            with pytest.raises(LinkLostError):
                given.receiver.check()
            given.receiver.close(arrived)
            await eventually(lambda: given.nothing_is_lent)
            with pytest.raises(TransferFailedError):
                await received_by(given.receiver, *at_once(given.offered(2)))
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA refused to pin it")


def test_memory_that_one_worker_cannot_map_is_unmapped_by_the_others_and_read_by_tcp() -> None:
    """The others kept it mapped, and pinned, for as long as the engine lived."""

    async def scenario() -> None:
        async with setting(num_workers=2) as given:
            buffer, worker = given.receiver._receive_buffer, given.memories[1]
            map_memory = worker.map
            worker.map = lambda server, *rest: (map_memory if server == buffer.address else refuse)(server, *rest)  # type: ignore[method-assign]
            image = given.offered()
            arrived = await received_by(given.receiver, *at_once(image))
            assert arrived.path is TransferPath.TCP
            assert given.counts.added[Counter.EMBEDDING_SHM_FALLBACKS, None] == 1
            assert arrived.locations == (image,)
            await eventually(lambda: list(given.memories[0]._mapped) == [buffer.address])
            await eventually(lambda: len(given.scheduler.table._digest_by_lease) == 1)
            for found in given.loaded(image):
                assert torch.equal(found, tokens_of(encoded(EmbeddingStore(MIB))).float())
            given.receiver.close(arrived)
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_a_receive_buffer_that_could_not_be_mapped_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with setting() as given:
            with monkeypatch.context() as patched:
                patched.setattr(WorkerMemory, "map", refuse)
                with pytest.raises(TransferFailedError, match="cannot map the receive buffer"):
                    await received_by(given.receiver, *at_once(given.offered(far=True)))
            given.receiver.close(await received_by(given.receiver, *at_once(given.offered(far=True))))
            await eventually(lambda: given.nothing_is_lent)

    run(scenario())


def test_who_leaves_while_it_is_borrowed_holds_nothing() -> None:
    async def scenario() -> None:
        async with setting() as given:
            for pause in range(6):  # event loop turns until the client leaves
                image = given.offered()
                borrowing = asyncio.create_task(received_by(given.receiver, *at_once(image)))
                for _ in range(pause):
                    await asyncio.sleep(0)
                borrowing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await borrowing
                given.store._offers.clear()
                await eventually(lambda: given.nothing_is_lent)

    run(scenario())


@pytest.mark.parametrize("shape", [(6, WIDTH + 1), (5, WIDTH)])
@pytest.mark.parametrize("by", ["a location", "an encoder"])
def test_what_does_not_fit_the_model_is_never_granted(by: str, shape: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            encoding: Any = image
            if by == "an encoder":
                (encoding,) = at_once(image)
            with pytest.raises(EmbeddingMismatchError, match="is not the expected") as error:
                await given.receiver.receive([encoding], [shape], ReceivedEmbeddings())
            assert error.value.image == 0
            assert len(given.receiver._granted) == len(given.scheduler.table._digest_by_lease) == 0

    run(scenario())
