"""A store of embeddings, a server of it, and a client; what a client by TCP reads into, and its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.same_host import (
    ShmClient,
    ShmServer,
)
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp import TcpError
from tests.unit.deployments.transfer.tcp_peers import MIB


@pytest.fixture
def store() -> EmbeddingStore:
    return EmbeddingStore(2**20)


@pytest.fixture
def server(store: EmbeddingStore) -> Iterator[ShmServer]:
    with closing(ShmServer(store)) as server:
        yield server


@pytest.fixture
def client(server: ShmServer) -> Iterator[ShmClient]:
    with closing(ShmClient(server.address)) as client:
        yield client


@pytest.fixture
def errors() -> Counter[TcpError]:
    return Counter()


@pytest.fixture
def buffer() -> ReceiveBuffer:
    return ReceiveBuffer(MIB, timeout_s=0.2)
