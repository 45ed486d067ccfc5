"""A node is lost and no request fails, or falls silent and its answers end; a client that hangs up behind HAProxy is
noticed as one behind Serve's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deployments import haproxy

ROOT = Path(__file__).parent.parent.parent.parent
LIMIT_S = 800
SILENT_S = 40.0
"""Until answers of a silent host end, at most; Ray misses it after 9 to 12 s here."""


def told_by(program: str, checkpoint: Path, **variables: str) -> dict[str, Any]:
    """The last line that the program prints, with these variables in its environment."""
    command = [sys.executable, "-m", f"tests.unit.deployments.{program}", str(checkpoint)]
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
    """With an error event each, as soon as Ray knows that the host is lost; the others go on."""
    patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # 5 s are too few for the proxy of a loaded machine
    found = told_by("silent_host", checkpoints["qwen3_vl"], **patience)
    assert {told["error"]["code"] for told in found["told"]} == {"replica_lost"}
    assert max(found["after_s"]) < SILENT_S
    assert found["goes_on"] > 0
    assert found["then"] == 200


@pytest.mark.chaos
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_lost_node_costs_no_request(checkpoints: dict[str, Path]) -> None:
    folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # paths of sockets must be short
    behind_haproxy = {"RAY_TMPDIR": folder, **haproxy.environment(Path(folder) / "haproxy")}
    del behind_haproxy["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"]  # the program calls by handles, outside of any loop
    try:
        found = told_by("two_nodes", checkpoints["qwen3_vl"], **behind_haproxy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert (found["failures"], found["wrong"]) == ([], [])
    assert found["answered"] > 0
    assert found["proxies"] > 0
    assert found["encoders"] == 2
