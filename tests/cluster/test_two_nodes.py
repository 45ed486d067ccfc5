"""A node is lost and no request fails, the head node among them, or falls silent and its answers end; a client that
hangs up behind HAProxy is noticed as one behind Serve's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer import namespaces
from deployments.http_proxy import haproxy
from tests.cluster.host_losses import REQUESTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 800
SILENT_S = 40.0
"""Until answers of a silent host end, at most; Ray misses it after 9 to 12 s here."""


def told_by(program: str, checkpoint: Path, **variables: str) -> dict[str, Any]:
    """The last line that the program prints, with these variables in its environment."""
    command = [sys.executable, "-m", f"tests.cluster.{program}", str(checkpoint)]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + 60)
def test_answers_of_a_silent_host_end(checkpoints: dict[str, Path]) -> None:
    """With an error event each, as soon as Ray knows that the host is lost; the others go on. What it has not accepted
    is answered by the other host, before that. Without affinity neither held: both waited for their deadline."""
    patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # 5 s are too few for the proxy of a loaded machine
    found = told_by("silent_host", checkpoints["qwen3_vl"], **patience)
    assert found.keys() == {"affinity", "without"}
    for each in found.values():
        assert {told["error"]["code"] for told in each["told"]} == {"replica_lost"}
        assert max(each["after_s"]) < SILENT_S
        assert each["goes_on"] > 0
        assert {status for status, _ in each["asked"]} == {200}
        assert max(seconds for _, seconds in each["asked"]) < SILENT_S


@contextmanager
def behind_haproxy() -> Iterator[dict[str, str]]:
    """Variables of a Ray and a HAProxy in a folder of their own."""
    folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # paths of sockets must be short
    try:
        yield {"RAY_TMPDIR": folder, **haproxy.environment(Path(folder) / "haproxy")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
def test_a_lost_head_costs_no_request_where_a_redis_has_rays_state(checkpoints: dict[str, Path]) -> None:
    port = haproxy.free_port()
    with behind_haproxy() as variables:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        variables |= {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{port}",
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(haproxy.free_port()),
        }
        try:
            found = told_by("head_lost", checkpoints["qwen3_vl"], **variables)
        finally:
            redis.kill()
            redis.wait()
    assert found["failed_after_s"] == []


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_lost_node_costs_no_request(checkpoints: dict[str, Path]) -> None:
    with behind_haproxy() as variables:
        del variables["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"]  # the program calls by handles, outside of any loop
        found = told_by("two_nodes", checkpoints["qwen3_vl"], **variables)
    assert (found["failures"], found["wrong"]) == ([], [])
    assert found["answered"] > 0
    assert found["proxies"] > 0
    assert found["encoders"] == 2


@pytest.mark.chaos
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.skipif(not namespaces.available(), reason="needs root, for network namespaces")
@pytest.mark.parametrize("loss", ["killed", "silent", "scaled down"])
def test_a_host_lost_under_load_costs_no_request(host_losses: dict[str, Any], loss: str) -> None:
    """Hosts are network namespaces. Only answers that had begun end early, with an error event."""
    found = host_losses[loss]
    assert (found["failures"], found["wrong"]) == ([], [])
    assert found["answered"] >= REQUESTS
    assert all("replica_lost" in end for end in found["ended"])
    assert found["longest_s"] < SILENT_S


@pytest.fixture(scope="module")
def host_losses(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return told_by("host_losses", checkpoints["qwen3_vl"], RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60")
