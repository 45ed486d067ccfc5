"""Ray below `serve run`: who has no token gets nothing from its dashboard and nothing from its control store."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import grpc  # type: ignore[import-untyped]
import httpx
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest  # type: ignore[attr-defined]
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from tests.serve.application import ServedApplication
from tests.serve.processes import family, title

pytestmark = pytest.mark.slow

ASK_GCS = (
    "import sys; from ray._raylet import GcsClient; print(len(GcsClient(sys.argv[1]).get_all_node_info(timeout=20)))"
)


def listening(application: ServedApplication, named: str) -> list[tuple[str, int]]:
    """Addresses and ports on which processes with this in their title listen."""
    found = []
    for process in family(application.pid):
        if named in title(process):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.append((connection.laddr.ip, connection.laddr.port))
    assert found, named
    return found


def test_the_dashboard_asks_for_a_token(application: ServedApplication) -> None:
    """What else its process has open are metrics, on a port that the README wants closed to the outside."""
    statuses = []
    for address, port in listening(application, "dashboard.py"):
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/api/jobs/", timeout=20)
        except httpx.TransportError:
            continue  # not HTTP/1.1
        statuses.append(answer.status_code)
        assert answer.status_code != 401 or address == "127.0.0.1"
        assert answer.status_code == 401 or answer.text.startswith("# HELP"), (port, answer.text[:300])
    assert 401 in statuses


def test_the_control_store_asks_for_a_token(application: ServedApplication) -> None:
    def asked(**environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        port = next(port for _, port in listening(application, "gcs_server"))
        return subprocess.run(
            [sys.executable, "-c", ASK_GCS, f"127.0.0.1:{port}"],
            env=inherited | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    stranger = asked(RAY_AUTH_MODE="disabled")
    assert stranger.returncode != 0
    assert "token" in stranger.stderr.lower() or "unauth" in stranger.stderr.lower(), stranger.stderr[-2000:]
    guest = asked(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    assert guest.returncode != 0
    assert asked(RAY_AUTH_MODE="token").stdout.strip() == "1", "the operator's own token"


def test_no_server_of_rays_client_is_up(application: ServedApplication) -> None:
    """It would listen on every address; `ray start --head` has one, which README wants closed to the outside."""
    assert not any("ray.util.client.server" in title(process) for process in family(application.pid))


def test_only_serve_answers_on_the_servers_port(application: ServedApplication, qwen3: str) -> None:
    port = httpx.URL(qwen3).port
    assert {address for address, found in listening(application, "ray::ProxyActor") if found == port} == {"127.0.0.1"}


def test_replicas_ask_each_other_for_a_token(application: ServedApplication) -> None:
    """What reaches them by gRPC they unpickle; the ingress and the language model are called like this."""
    codes = []
    request = ASGIRequest(pickled_request_metadata=pickle.dumps(None))
    for _, port in listening(application, "qwen3:LLM"):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                ASGIServiceStub(channel).HandleRequest(request, timeout=2)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert grpc.StatusCode.OK not in codes
