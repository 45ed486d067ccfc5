"""The process of NIXL: what its callers get when it ends, is silent or does not start. Its memory is a stand-in."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from deployments.transfer import rdma_process
from deployments.transfer.rdma import NotInstalledError, ReadError
from deployments.transfer.rdma_process import RdmaProcess, serve
from deployments.transfer.shared_memory import Arena
from tests.unit.deployments.transfer.loopback_memory import METADATA, Loopback, not_started, without_nixl
from tests.unit.deployments.transfer.stored_embeddings import eventually


@pytest.fixture
def arena() -> Arena:
    return Arena(4096)


@pytest.fixture
def ended() -> list[float]:
    return []


@pytest.fixture
def rdma(arena: Arena, ended: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[RdmaProcess]:
    monkeypatch.setattr(rdma_process, "RESTART_PAUSE_S", 0.0)
    run = partial(serve, make_memory=Loopback)
    with closing(RdmaProcess(run=run, on_ended=lambda: ended.append(1), call_timeout_s=1.0)) as rdma:
        rdma.start(arena)
        yield rdma


def read(rdma: RdmaProcess, source: int, num_bytes: int = 8, *, notify: bytes = b"") -> None:
    endpoint = rdma.endpoint()
    assert endpoint is not None
    started = rdma.read(endpoint.agent_metadata, endpoint.address + source, 1024, num_bytes, notify=notify)
    while not started.done():
        pass


def test_bytes_are_read_into_the_shared_arena_and_the_reader_is_told(rdma: RdmaProcess, arena: Arena) -> None:
    arena.write(16, b"embedded")
    read(rdma, 16, notify=b"lease")
    assert ctypes.string_at(arena.address + 1024, 8) == b"embedded"
    assert rdma.get_notifications() == [b"lease"]
    rdma.disconnect(METADATA)
    assert rdma.get_notifications() == [b"disconnected"]


def test_an_error_of_a_read_leaves_the_process(rdma: RdmaProcess, ended: list[float]) -> None:
    with pytest.raises(ReadError, match="NOT_FOUND"):
        read(rdma, 5000)
    read(rdma, 0)
    assert not ended


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_process_that_aborts_or_is_silent_costs_its_reads_and_is_started_again(
    rdma: RdmaProcess, ended: list[float], num_bytes: int
) -> None:
    """A failed assertion of UCX ended the language model's engine."""
    before = rdma.endpoint()
    assert before is not None
    under_way = rdma.read(METADATA, before.address, 0, 8)
    with pytest.raises(ReadError, match="has ended and is started again"):
        read(rdma, 0, num_bytes)
    with pytest.raises(ReadError, match="has ended"):
        under_way.done()
    rdma.disconnect(METADATA)
    eventually(lambda: rdma.endpoint() is not None)
    read(rdma, 0)
    assert len(ended) == 1


def test_without_a_process_every_call_fails_at_once(rdma: RdmaProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_process, "RESTART_PAUSE_S", 600.0)
    assert rdma._child is not None
    assert rdma._child._process.pid is not None
    os.kill(rdma._child._process.pid, signal.SIGKILL)
    eventually(lambda: rdma.endpoint() is None)
    with pytest.raises(ReadError):
        rdma.read(METADATA, 0, 0, 8)
    assert rdma.get_notifications() == []


def test_after_its_end_nothing_is_started(rdma: RdmaProcess, ended: list[float]) -> None:
    rdma.close()
    assert rdma.endpoint() is None
    assert not ended


def test_a_start_that_fails_says_why(arena: Arena) -> None:
    with pytest.raises(NotInstalledError, match=r"pip install 'vitray\[nixl\]'"):
        RdmaProcess(run=partial(serve, make_memory=without_nixl)).start(arena)
    with pytest.raises(NotInstalledError, match="its process ended"):
        RdmaProcess(run=not_started).start(arena)
