"""Embeddings read by TCP between two network namespaces, whose one host is lost during a transfer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.transfer import namespaces
from deployments.transfer import tcp
from tests.unit.deployments.transfer.stored_embeddings import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not namespaces.available(), reason="needs root, for network namespaces"),
]
TOKENS = 1_000_000
"""128 MB, more than sockets buffer."""
SECRET = (b"s" * 32).hex()
MARGIN_S = 10.0


def read(loss: str) -> dict[str, Any]:
    module = "tests.unit.deployments.transfer"
    with namespaces.namespaces():
        program = [sys.executable, "-m", f"{module}.tcp_source", str(TOKENS), SECRET, "vitray0"]
        pipe = subprocess.PIPE
        source = subprocess.Popen(namespaces.command_in(1, *program), cwd=ROOT, stdout=pipe, text=True)
        try:
            assert source.stdout is not None
            address = json.loads(source.stdout.readline())["tcp"]
            assert address.startswith(namespaces.ADDRESSES[1])
            program = [sys.executable, "-m", f"{module}.tcp_reader", address, str(TOKENS), SECRET, loss]
            done = subprocess.run(
                namespaces.command_in(0, *program), cwd=ROOT, capture_output=True, text=True, check=False
            )
        finally:
            namespaces.kill(1)
            source.wait()
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_embedding_crosses_from_host_to_host() -> None:
    assert read("none") == {"errors": []}


@pytest.mark.parametrize("loss", ["killed", "unplugged"])
def test_a_host_that_is_lost_during_a_transfer_is_noticed_in_time(loss: str) -> None:
    found = read(loss)
    assert found["errors"] == ["connection" if loss == "killed" else "timeout"], found
    assert found["seconds"] < tcp.STALL_TIMEOUT_S + MARGIN_S
    assert found["free"]
