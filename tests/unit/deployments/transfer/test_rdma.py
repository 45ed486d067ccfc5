"""NIXL itself, between two processes of this machine, over TCP as between hosts and over what UCX chooses."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
import torch

from deployments.common.messages import RemoteLocation, SharedEmbedding
from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import (
    PATIENCE_S,
    ROOT,
    TIMINGS,
    WIDTH,
    digest,
    encoded,
    eventually,
    read,
    tokens_of,
)
from tests.unit.deployments.transfer.test_remote_sender import is_free

installed = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed (pip install 'vitray[nixl]')"
)
LARGE = 500_000
"""Tokens: 64 MB."""


class Source:
    """The other process."""

    def __init__(self, environment: dict[str, str]) -> None:
        program = [sys.executable, "-m", "tests.unit.deployments.transfer.nixl_source"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            program, cwd=ROOT, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True, bufsize=1
        )

    def lend(self, number: int = 1, *, tokens: int = 6) -> SharedEmbedding:
        told = self._answer({"number": number, "tokens": tokens})
        agent_metadata, lease = (base64.b64decode(told[key]) for key in ("agent_metadata", "lease"))
        place = RemoteLocation(agent_metadata, told["address"], lease)
        return SharedEmbedding(digest(number), "bfloat16", (tokens, WIDTH), TIMINGS, server="", remote=place)

    def lent(self) -> int:
        """Embeddings that it keeps for readers."""
        return int(self._answer({})["lent"])

    def _answer(self, asked: dict[str, int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        return next(json.loads(line) for line in self.process.stdout if line.startswith("{"))

    def kill(self) -> None:
        """With the process of NIXL, as when the host is lost."""
        for child in psutil.Process(self.process.pid).children() if self.process.poll() is None else []:
            child.kill()
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["tcp", None])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    environment = {} if request.param is None else {"UCX_TLS": request.param}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source = Source(environment)
    yield source
    source.kill()


@pytest.fixture
def reader(source: Source) -> Iterator[RemoteReader]:  # after `source`, whose environment NIXL reads
    with closing(RemoteReader(RdmaProcess(), ReceiveBuffer(2**27, timeout_s=PATIENCE_S))) as reader:
        yield reader


def left_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "ucx" in name}  # noqa: PTH208


@installed
def test_embeddings_arrive_bit_by_bit(source: Source, reader: RemoteReader) -> None:
    for number, tokens in ((1, 6), (2, LARGE)):
        image = source.lend(number, tokens=tokens)
        received = reader.receive(image).result(PATIENCE_S)
        expected = tokens_of(encoded(EmbeddingStore(2**27), number, tokens=tokens))
        assert torch.equal(read(received), expected)
        del received
    eventually(lambda: is_free(reader._buffer))
    eventually(lambda: source.lent() == 0)


@installed
def test_what_is_not_the_encoders_cannot_be_read(source: Source, reader: RemoteReader) -> None:
    image = source.lend()
    assert image.remote is not None
    outside = RemoteLocation(image.remote.agent_metadata, image.remote.address + 2**28, b"")
    wrong = SharedEmbedding(image.digest, image.dtype, image.shape, TIMINGS, "", remote=outside)
    with pytest.raises(EmbeddingUnavailableError, match="NOT_FOUND"):
        reader.receive(wrong).result(PATIENCE_S)
    reader.receive(image).result(PATIENCE_S)


@installed
def test_an_encoder_that_is_killed_is_noticed_and_leaves_nothing(source: Source, reader: RemoteReader) -> None:
    before = left_in_shared_memory()
    reader.receive(source.lend()).result(PATIENCE_S)
    image = source.lend(2, tokens=LARGE)
    os.kill(source.process.pid, signal.SIGSTOP)  # so that it dies in the middle
    coming = reader.receive(image)
    eventually(lambda: coming.done() or any(pending.read is not None for pending in reader._pending))
    source.kill()
    if (error := coming.exception(PATIENCE_S)) is None:  # the memory was read without its process
        coming.result().release()
    else:
        assert isinstance(error, EmbeddingUnavailableError)
    with pytest.raises(EmbeddingUnavailableError):
        reader.receive(image).result(PATIENCE_S)
    eventually(lambda: is_free(reader._buffer))
    assert left_in_shared_memory() <= before


@installed
def test_an_encoder_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read has no end of its own, and goes on writing when it was given up."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # where its process has to move the bytes
    source = Source({})
    try:
        with closing(RemoteReader(RdmaProcess(), ReceiveBuffer(2**27, timeout_s=1.0))) as reader:
            reader.receive(source.lend()).result(PATIENCE_S)
            image = source.lend(2, tokens=LARGE)
            os.kill(source.process.pid, signal.SIGSTOP)
            with pytest.raises(EmbeddingUnavailableError, match="no bytes"):
                reader.receive(image).result(PATIENCE_S)
            assert reader._buffer.arena.free_bytes < reader._buffer.num_bytes - LARGE * WIDTH
            os.kill(source.process.pid, signal.SIGCONT)
            eventually(lambda: is_free(reader._buffer))
    finally:
        source.kill()


@installed
def test_a_new_process_is_read_from_after_the_old_one(source: Source, reader: RemoteReader) -> None:
    reader.receive(source.lend()).result(PATIENCE_S)
    source.kill()
    other = Source({})
    try:
        reader.receive(other.lend()).result(PATIENCE_S)
    finally:
        other.kill()


@installed
def test_a_process_of_nixl_that_aborts_costs_reads_and_is_started_again(source: Source, reader: RemoteReader) -> None:
    reader.receive(source.lend()).result(PATIENCE_S)
    child = reader._rdma._child
    assert child is not None
    assert child._process.pid is not None
    os.kill(child._process.pid, signal.SIGABRT)
    image = source.lend(2)
    with pytest.raises(EmbeddingUnavailableError, match="ended and is restarting"):
        reader.receive(image).result(PATIENCE_S)
    eventually(lambda: reader._rdma.endpoint() is not None)
    reader.receive(image).result(PATIENCE_S)


READER = """
import pickle, sys, time
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.rdma_process import RdmaProcess
reader = RemoteReader(RdmaProcess(), ReceiveBuffer(2**27, timeout_s=60))
print("ready", flush=True)  # an embedding is lent for a bounded time
received = reader.receive(pickle.loads(bytes.fromhex(sys.stdin.readline()))).result(60)
print("received", flush=True)
time.sleep(600)
"""


@installed
def test_a_language_model_that_is_killed_keeps_nobody_from_reading(source: Source, reader: RemoteReader) -> None:
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", READER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    assert other.stdin is not None
    assert other.stdout is not None
    assert any(line == "ready\n" for line in other.stdout)
    other.stdin.write(pickle.dumps(source.lend(tokens=LARGE)).hex() + "\n")
    assert any(line == "received\n" for line in other.stdout)
    other.kill()
    other.wait()
    for number in (2, 3):
        reader.receive(source.lend(number)).result(PATIENCE_S)
    eventually(lambda: source.lent() == 0)
    assert left_in_shared_memory() == set()
