"""The replica's link to its engine's processes, without embeddings: what a bad message, a lost connection and thousands
of leases at once do to it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest
import torch

from deployments.transfer.header import Header
from deployments.vllm.compat import FirstTokenClock
from deployments.vllm.connector.lease_table import EndedLease, EngineLease
from deployments.vllm.connector.link import MAX_DIGESTS, LeasesEnded, Loaded, Map, Role
from deployments.vllm.connector.replica_link import ReplicaLink
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from tests.unit.deployments.transfer.stored_embeddings import eventually

PATIENCE_S = 60.0
NUM_REQUESTS, NUM_IMAGES = 625, 16


def digest(request: int, image: int) -> str:
    return f"{request:032x}{image:032x}"


def engine_lease(lease: str, of: str = "d" * 64) -> EngineLease:
    return EngineLease(lease, "server", 0, Header(of, "bfloat16", (1024, 16384)), 0.0)


@dataclass
class Told:
    """What a link has told."""

    ended: SimpleQueue[str] = field(default_factory=SimpleQueue)
    loaded: list[Loaded] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def link(self, num_workers: int) -> ReplicaLink:
        return ReplicaLink(
            num_workers,
            on_ended=self.ended.put,
            on_loaded=self.loaded.append,
            on_missing=lambda _, digests: self.missing.extend(digests),
        )


@dataclass
class Engine:
    link: ReplicaLink
    told: Told
    scheduler: SchedulerLink
    memories: list[WorkerMemory]
    workers: list[WorkerLink]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """With two workers."""
    told = Told()
    with closing(told.link(2)) as link:
        memories = [WorkerMemory(torch.device("cpu")) for _ in range(2)]
        given = Engine(
            link,
            told,
            SchedulerLink(link.address),
            memories,
            [WorkerLink(link.address, memory) for memory in memories],
        )
        assert link.wait_for_engine(timeout_s=PATIENCE_S)
        yield given


@contextmanager
def mapped_file() -> Iterator[int]:
    file = os.memfd_create("embeddings")
    os.ftruncate(file, 4096)
    try:
        yield file
    finally:
        os.close(file)


def release_all(address: str, pipe: Connection) -> None:
    """An engine's process whose scheduler is done with all requests in one step, while their leases are withdrawn."""
    end = SchedulerLink(address)
    pipe.recv()
    eventually(lambda: len(end.table._digest_by_lease) == NUM_REQUESTS * NUM_IMAGES)
    for request in range(NUM_REQUESTS):
        end.reserve(f"request {request}", [digest(request, image) for image in range(NUM_IMAGES)])
    pipe.send("in use")
    pipe.recv()
    for request in range(NUM_REQUESTS):
        end.finish_request(f"request {request}")
    pipe.recv()


def test_ten_thousand_leases_that_end_at_once_do_not_stop_the_replica() -> None:
    """An ingress ends, and with it hundreds of requests. The replica's event loop sent each withdrawal under a lock
    that its listening thread needs, the engine's listening thread sent each answer by a socket that was full: the loop,
    the replica's listening thread and the engine's waited for each other for ever."""
    told = Told()
    leases = {request: [f"{request:08}{image:08}" for image in range(NUM_IMAGES)] for request in range(NUM_REQUESTS)}
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with closing(told.link(1)) as link:
        process = multiprocessing.get_context("spawn").Process(target=release_all, args=(link.address, theirs))
        process.start()
        try:
            eventually(lambda: link._scheduler is not None)
            for request in range(NUM_REQUESTS):
                for image in range(NUM_IMAGES):
                    link.grant(engine_lease(leases[request][image], digest(request, image)))
            mine.send("all are given")
            assert mine.recv() == "in use"
            mine.send("finish")

            def finish() -> None:
                for each in leases.values():
                    link.release(each)

            loop = threading.Thread(target=finish, daemon=True)
            loop.start()
            loop.join(PATIENCE_S)
            assert not loop.is_alive()
            ended = {told.ended.get(timeout=PATIENCE_S) for _ in range(NUM_REQUESTS * NUM_IMAGES)}
            assert ended == {lease for of_request in leases.values() for lease in of_request}
            mine.send("end")
        finally:
            process.terminate()
            process.join()


def test_more_leases_than_a_packet_holds_are_withdrawn_at_once(engine: Engine) -> None:
    leases = [f"{number:016}" for number in range(5000)]
    for lease in leases:
        engine.link.grant(engine_lease(lease))
    engine.link.release(leases)
    assert {engine.told.ended.get(timeout=PATIENCE_S) for _ in leases} == set(leases)


def test_a_message_that_cannot_be_handled_is_logged_and_the_next_one_is_handled(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them ended the thread that listens, and with it all that follows: leases did not end any more, and a
    worker mapped nothing more, without a word."""
    assert engine.link._scheduler is not None
    for process in (engine.link._scheduler, *engine.link._workers):
        process.send({"type": "Grant", "lease": "not a lease"})
    engine.scheduler._connection.send(LeasesEnded([EndedLease("of nobody", 1)]))
    engine.workers[0]._connection.send(Loaded("of nobody", 1, 1.0))
    expected = 2 * ["the handling of a message failed"] + 3 * ["a message could not be read"]
    eventually(lambda: sorted(caplog.messages) == sorted(expected))
    assert engine.link.lost() is None
    engine.link.grant(engine_lease("lease"))
    eventually(lambda: engine.scheduler.reserve("request", ["d" * 64]) == 1)
    engine.scheduler.finish_request("request")
    engine.link.release(["lease"])
    assert engine.told.ended.get(timeout=PATIENCE_S) == "lease"


def test_memory_that_cannot_be_unmapped_does_not_keep_other_memory_from_being_mapped(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA refused to unpin it")

    engine.memories[0].unmap = refuse  # type: ignore[method-assign]
    engine.link.unmap("server")
    eventually(lambda: caplog.messages == ["the handling of a message failed"])
    with mapped_file() as file:
        for future in engine.link.map("another", file, 4096):
            future.result(PATIENCE_S)


@pytest.mark.parametrize("lost", Role)
def test_a_process_of_the_engine_that_is_out_of_reach_fails_the_health_check(lost: Role, engine: Engine) -> None:
    """A thread that ends closes its connection, so that the replica hears of it."""
    assert engine.link.lost() is None
    (engine.scheduler if lost is Role.SCHEDULER else engine.workers[1]).close()
    eventually(lambda: engine.link._scheduler is None or len(engine.link._workers) == 1)
    told = "no scheduler, 2 of 2" if lost is Role.SCHEDULER else "the scheduler, 1 of 2"
    assert told in (engine.link.lost() or "")


def test_a_listening_thread_of_the_engine_that_ends_ends_its_connection(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would hear that the worker maps nothing any more."""

    def broken(_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # it would fail the test
    monkeypatch.setattr(engine.workers[0]._connection, "send", broken)
    engine.link.unmap("server")
    for worker in engine.link._workers:
        worker.send(Map("server", 4096))
    eventually(lambda: len(engine.link._workers) == 1)
    assert engine.link.lost() is not None


def test_an_accepting_thread_that_ends_fails_the_health_check(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.link._listener._thread, "is_alive", lambda: False)
    assert "accepts" in (engine.link.lost() or "")


def test_as_many_missing_embeddings_as_fit_a_message_are_reported(engine: Engine) -> None:
    """A report that fits no packet would end vLLM's scheduler, in which it is made."""
    name = f"127_chatcmpl-{FirstTokenClock().name_prompt()}-01234567"  # as vLLM extends it
    digests = [digest(1, number) for number in range(MAX_DIGESTS + 1)]
    assert engine.scheduler.reserve(name, digests) == 0
    eventually(lambda: engine.told.missing == digests)


def test_nothing_is_mapped_where_a_worker_is_missing(engine: Engine) -> None:
    """With no worker left it "succeeded", and the engine was given embeddings of memory that it had not mapped."""
    for worker in engine.workers:
        worker.close()
    eventually(lambda: not engine.link._workers)
    with mapped_file() as file, pytest.raises(ConnectionError, match="0 of 2 workers"):
        engine.link.map("server", file, 4096)


def test_a_lease_stays_open_where_the_worker_that_is_to_load_by_it_is_out_of_reach(engine: Engine) -> None:
    """As many loads are due as the engine has workers, not as are connected: with none left, what a worker was reading
    counted as read."""
    engine.link.grant(engine_lease("lease"))
    eventually(lambda: engine.scheduler.reserve("request", ["d" * 64]) == 1)
    engine.scheduler.table.plan_load("d" * 64)
    for worker in engine.workers:
        worker.close()
    eventually(lambda: not engine.link._workers)
    engine.scheduler.finish_request("request")
    engine.link.grant(engine_lease("another", "e" * 64))
    engine.link.release(["lease", "another"])
    assert engine.told.ended.get(timeout=PATIENCE_S) == "another", "nothing was to be loaded by it"
    assert engine.told.ended.empty()


def test_an_engine_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0"):
        Told().link(0)
