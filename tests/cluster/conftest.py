"""Ray, Serve and the application with a stand-in for vLLM, each started by the first test that asks for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deployments.http_proxy import limits as proxy_bounds
from tests.cluster.served import Cluster, ServedApp, deploy
from tests.cluster.span_receiver import SpanReceiver
from tests.programs import free_port, start_ray
from tests.waiting import until

REPORT_INTERVAL_MS = 4000
"""Interval at which processes report what they have counted since the last time. Ray drops a report that takes half of
it, so that on a busy host a shorter one loses counts."""


def tell_errors(folder: Path) -> None:
    """What replicas logged as errors, whose files go with the cluster."""
    for log in sorted(folder.glob("session_2*/logs/serve/*.log")):
        _, error, rest = log.read_text(errors="replace").partition("ERROR ")
        if error:
            print(f"{log.name}: {error}{rest[:4000]}")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Ray and Serve, with nothing deployed. Where a test failed, what replicas logged as errors is told at the end."""
    import ray
    from ray import serve

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ[proxy_bounds.VARIABLE] = proxy_bounds.IMPORT_PATH  # before Serve's modules read it
    for source in ("REPLICA", "HANDLE"):  # what a policy knows is as old as this
        os.environ[f"RAY_SERVE_{source}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"
    spans = SpanReceiver()
    os.environ |= spans.environment
    folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # paths of Ray's sockets must be short, pytest's folders are not
    ports = Cluster(free_port(), free_port(), spans)
    try:
        options: dict[str, Any] = {
            "num_cpus": 4,
            "num_gpus": 0,
            "object_store_memory": 150 * 2**20,
            "include_dashboard": False,
            "log_to_driver": False,
            "_temp_dir": folder,
            "_metrics_export_port": ports.metrics_port,
            "_system_config": {"metrics_report_interval_ms": REPORT_INTERVAL_MS},
        }
        start_ray(partial(ray.init, address="local", **options))
        until(ports.exports_metrics, "Ray's metrics port")  # what a replica counts before that is lost
        serve.start(http_options={"host": "127.0.0.1", "port": ports.http_port})
        yield ports
    finally:
        ray.shutdown()
        spans.close()
        if request.session.testsfailed:
            tell_errors(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def app(cluster: Cluster, checkpoints: dict[str, Path]) -> ServedApp:
    return deploy(cluster, checkpoints["qwen3_vl"], "app")
