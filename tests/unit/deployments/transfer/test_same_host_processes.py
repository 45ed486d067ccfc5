"""Embeddings shared between processes, of which one is killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deployments.common.messages import EncodedImage
from deployments.transfer.same_host import (
    ShmClient,
    ShmServer,
)
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.transfer.stored_embeddings import (
    ROOT,
    encoded,
    eventually,
    hold,
    read,
    tokens_of,
)

SERVES = """
import sys, torch
from deployments.transfer.shared_store import EmbeddingStore
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.transfer.same_host import ShmServer
from tests.unit.deployments.transfer.stored_embeddings import encoded
store = EmbeddingStore(2**20)
server = ShmServer(store)
image = encoded(store)
store.offer(image)
print(server.address, flush=True)
sys.stdin.read()
"""

READS = """
import sys
from deployments.transfer.same_host import ShmClient
from tests.unit.deployments.transfer.stored_embeddings import header
client = ShmClient(sys.argv[1])
client.acquire(header(1)).result(60)
print("holds", flush=True)
sys.stdin.read()
"""


def other_process(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def sockets(process: int | None = None) -> set[str]:
    """Names of ours, of one process or on the whole machine, where others may run as well."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "/vitray-" in line]
    if process is not None:
        files = {str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir()}
        lines = [line for line in lines if f"socket:[{line[-2]}]" in files]
    return {line[-1] for line in lines}


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "vitray" in path.name}


@pytest.mark.slow
def test_a_killed_client_holds_nothing(store: EmbeddingStore, server: ShmServer) -> None:
    whole = store.arena.free_bytes
    store.offer(encoded(store))
    with other_process(READS, server.address) as borrower:
        assert said(borrower) == "holds"
        gc.collect()
        assert store.arena.free_bytes < whole
        borrower.send_signal(signal.SIGKILL)
        eventually(lambda: store.arena.free_bytes == whole)


@pytest.mark.slow
def test_a_killed_lender_leaves_nothing_but_what_is_held() -> None:
    before = shared_files()
    image = encoded(EmbeddingStore(2**20))  # the same as the other process makes
    with other_process(SERVES) as process:
        address = said(process)
        assert sockets(process.pid) == {"@" + address}, "no name but its socket's"
        file = survives(ShmClient(address), process, image)
        eventually(lambda: "@" + address not in sockets())
    assert shared_files() <= before
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def survives(client: ShmClient, lends: subprocess.Popen[str], image: EncodedImage) -> int:
    """What is held of a server that is killed stays whole. Returns the file that its memory came as."""
    held = hold(client, image)
    lends.send_signal(signal.SIGKILL)
    eventually(lambda: not client.is_alive)
    found = read(held)
    assert torch.equal(found, tokens_of(image))
    return client.file
