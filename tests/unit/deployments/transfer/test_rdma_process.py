"""The process of NIXL: what its callers get when it ends, is silent or does not start. Its memory is a stand-in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import psutil
import pytest

from deployments.transfer import rdma_process
from deployments.transfer.rdma import NotInstalledError, ReadError
from deployments.transfer.rdma_process import RdmaProcess, serve
from deployments.transfer.shared_memory import Arena
from tests.unit.deployments.transfer.loopback_memory import METADATA, Loopback, not_started, silent, without_nixl
from tests.unit.deployments.transfer.stored_embeddings import ROOT, eventually


@pytest.fixture
def arena() -> Arena:
    return Arena(4096)


@pytest.fixture
def restarts() -> list[int]:
    return []


@pytest.fixture
def rdma(arena: Arena, restarts: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[RdmaProcess]:
    monkeypatch.setattr(rdma_process, "RESTART_PAUSE_S", 0.0)
    run = partial(serve, make_memory=Loopback)
    with closing(RdmaProcess(run=run, on_restarted=lambda: restarts.append(1), call_timeout_s=20.0)) as rdma:
        rdma.start(arena)
        yield rdma


def read(rdma: RdmaProcess, source: int, num_bytes: int = 8, *, notify: bytes = b"") -> None:
    endpoint = rdma.endpoint()
    assert endpoint is not None
    started = rdma.read(endpoint.agent_metadata, endpoint.address + source, 1024, num_bytes, notify=notify)
    while not started():
        pass


def test_bytes_are_read_into_the_shared_arena_and_the_reader_is_told(rdma: RdmaProcess, arena: Arena) -> None:
    arena.write(16, b"embedded")
    read(rdma, 16, notify=b"lease")
    assert ctypes.string_at(arena.address + 1024, 8) == b"embedded"
    assert rdma.get_notifications() == [b"lease"]
    rdma.disconnect(METADATA)
    assert rdma.get_notifications() == [b"disconnected"]


def test_an_error_of_a_read_leaves_the_process(rdma: RdmaProcess, restarts: list[int]) -> None:
    with pytest.raises(ReadError, match="NOT_FOUND"):
        read(rdma, 5000)
    read(rdma, 0)
    assert not restarts


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_process_that_aborts_or_is_silent_costs_its_reads_and_is_started_again(
    rdma: RdmaProcess, restarts: list[int], num_bytes: int
) -> None:
    """A failed assertion of UCX ended the language model's engine."""
    rdma._call_timeout_s = 20.0 if num_bytes == 0 else 1.0
    before = rdma.endpoint()
    assert before is not None
    under_way = rdma.read(METADATA, before.address, 0, 8)
    with pytest.raises(ReadError, match="ended and is restarting"):
        read(rdma, 0, num_bytes)
    with pytest.raises(ReadError, match="ended"):
        under_way()
    rdma.disconnect(METADATA)
    rdma._call_timeout_s = 20.0
    eventually(lambda: rdma.endpoint() is not None)
    read(rdma, 0)
    eventually(lambda: len(restarts) == 1)


def test_without_a_process_every_call_fails_at_once(rdma: RdmaProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_process, "RESTART_PAUSE_S", 600.0)
    assert rdma._child is not None
    assert rdma._child._process.pid is not None
    os.kill(rdma._child._process.pid, signal.SIGKILL)
    eventually(lambda: rdma.endpoint() is None)
    with pytest.raises(ReadError):
        rdma.read(METADATA, 0, 0, 8)
    assert rdma.get_notifications() == []


def test_after_its_end_nothing_is_started(rdma: RdmaProcess, restarts: list[int]) -> None:
    rdma.close()
    assert rdma.endpoint() is None
    eventually(lambda: all(thread.name != "rdma-start" for thread in threading.enumerate()))
    assert rdma._child is None
    assert not restarts


def test_a_restart_that_fails_is_tried_again(rdma: RdmaProcess, restarts: list[int]) -> None:
    run, rdma._run = rdma._run, not_started
    with pytest.raises(ReadError):
        read(rdma, 0, 0)
    time.sleep(1.0)
    assert rdma.endpoint() is None
    assert not restarts
    rdma._run = run
    eventually(lambda: rdma.endpoint() is not None)
    read(rdma, 0)
    eventually(lambda: len(restarts) == 1)


def test_pauses_before_restarts_grow_until_a_process_has_lived(
    rdma: RdmaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is aborted by every read must not be started each second."""
    monkeypatch.setattr(rdma_process, "RESTART_PAUSE_S", 0.01)
    pauses: list[float | None] = []
    monkeypatch.setattr(rdma._closed, "wait", pauses.append)
    for _ in range(3):
        with pytest.raises(ReadError):
            read(rdma, 0, 0)
        eventually(lambda: rdma.endpoint() is not None)
    monkeypatch.setattr(rdma_process, "MAX_RESTART_PAUSE_S", 0.0)
    with pytest.raises(ReadError):
        read(rdma, 0, 0)
    eventually(lambda: rdma.endpoint() is not None)
    assert pauses == [0.01, 0.02, 0.04, 0.01]


def test_a_start_that_fails_says_why(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInstalledError, match=r"pip install 'vitray\[nixl\]'"):
        RdmaProcess(run=partial(serve, make_memory=without_nixl)).start(arena)
    with pytest.raises(NotInstalledError, match="its process ended"):
        RdmaProcess(run=not_started).start(arena)
    monkeypatch.setattr(rdma_process, "START_TIMEOUT_S", 0.1)
    before = multiprocessing.active_children()
    with pytest.raises(NotInstalledError, match=r"does not start in 0\.1 s"):
        RdmaProcess(run=silent).start(arena)
    assert multiprocessing.active_children() == before


REPLICA = """
from functools import partial
from deployments.transfer.rdma_process import RdmaProcess, serve
from deployments.transfer.shared_memory import Arena
from tests.unit.deployments.transfer.loopback_memory import METADATA, Loopback
rdma = RdmaProcess(run=partial(serve, make_memory=Loopback), call_timeout_s=600)
rdma.start(Arena(4096))
rdma.read(METADATA, rdma.endpoint().address, 0, 1)
"""


def test_a_process_in_a_call_ends_with_a_replica_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", REPLICA], cwd=ROOT, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        pid = int(replica.stdout.readline())
        replica.kill()
    eventually(lambda: has_ended(pid))


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
