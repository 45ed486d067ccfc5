"""Small checkpoints, and the application on a Ray cluster of its own, with a stand-in for vLLM.

The cluster and the application are started once, by the first test that asks for them.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.schema import AppConfig
from deployments import proxy_bounds
from tests.unit.deployments.span_receiver import SpanReceiver
from training.checkpoints import make_checkpoint

MAX_QUEUED_TOKENS = 200
RETRY_AFTER_S = 3
START_S = 120


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One in float32 of each architecture."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: make_checkpoint(arch, folder / arch) for arch in ("qwen3_vl", "qwen2_5_vl")}


def free_port() -> int:
    """A TCP port that nobody listens on. Serve would share one with another Serve without a word (SO_REUSEPORT)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Cluster:
    http_port: int
    metrics_port: int
    spans: SpanReceiver
    """Of requests whose client asks for a trace; no others are traced."""


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
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=0,
            object_store_memory=150 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _metrics_export_port=ports.metrics_port,
            _system_config={"metrics_report_interval_ms": 200},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": ports.http_port})
        yield ports
    finally:
        ray.shutdown()
        spans.close()
        if request.session.testsfailed:
            tell_errors(Path(folder))
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`, asked again and again; fails naming `what` when there is none for long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited in vain: {what}")


class ServedApp:
    """The application behind HTTP, and the handles by which a test reaches its replicas."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        from ray import serve

        self.url = f"http://127.0.0.1:{cluster.http_port}/{name}"
        self._metrics_url = f"http://127.0.0.1:{cluster.metrics_port}/metrics"
        self._name = name
        self._encoder = serve.get_deployment_handle("Encoder", name)
        self._llm = serve.get_deployment_handle("LLM", name)
        self._ingress = serve.get_deployment_handle("Ingress", name)

    def encoder(self, method: str, **arguments: object) -> Any:
        return getattr(self._encoder, method).remote(**arguments).result(timeout_s=START_S)

    def encoders(self, method: str, **arguments: object) -> list[Any]:
        """Of each encoder replica."""
        return list(self._encoder.broadcast(method, **arguments).results(timeout_s=START_S))

    def ingresses(self, method: str) -> list[Any]:
        """Of each ingress replica."""
        return list(self._ingress.broadcast(method).results(timeout_s=START_S))

    def llm(self, method: str) -> Any:
        return getattr(self._llm, method).remote().result(timeout_s=START_S)

    def llms(self, method: str) -> list[Any]:
        """Of each language model replica."""
        return list(self._llm.broadcast(method).results(timeout_s=START_S))

    def ingress(self, method: str) -> Any:
        return getattr(self._ingress, method).remote().result(timeout_s=START_S)

    def exported(self, deployment: str) -> dict[str, float]:
        """What Ray's metrics port shows of ours for a deployment, its replicas added up; names without `ray_`."""
        found: dict[str, float] = {}
        for line in httpx.get(self._metrics_url).text.splitlines():
            labels = (f'deployment="{deployment}"', f'application="{self._name}"')
            if line.startswith("ray_vitray_") and all(label in line for label in labels):
                name = line.partition("{")[0].removeprefix("ray_")
                found[name] = found.get(name, 0) + float(line.rpartition(" ")[2])
        return found


def deploy(
    cluster: Cluster,
    checkpoint: Path,
    name: str,
    *,
    replicas: int = 1,
    encoders: int | None = None,
    llms: int | None = None,
    ingress: dict[str, object] | None = None,
    drain_s: float = 20.0,
    others_on: str | None = None,
    **encoder: object,
) -> ServedApp:
    """The application under `/name`, routed as `build_app` has it, with so many replicas of each deployment.

    `encoder` and `ingress`: settings of `encoder_replica` and `ingress` that differ.
    `drain_s`: what a replica that is to go has to end its answers. `others_on`: a resource of the nodes that all but
    the encoders run on, of which there is one a node then. `llms`: so many, one a node, wherever the others are.
    """
    from ray import serve

    from deployments.app import routing
    from encoder.vision_config import VisionConfig
    from tests.unit.deployments.controlled import ControlledEncoder, StandInLLM
    from tests.unit.deployments.watched import WatchedIngress

    config = AppConfig.model_validate(
        {
            "model": str(checkpoint),
            "encoder_replica": {
                "decode_workers": 1,
                "max_queued_tokens": MAX_QUEUED_TOKENS,
                "num_gpus": 0,
                **encoder,
            },
            "ingress": {"retry_after_s": RETRY_AFTER_S, **(ingress or {})},
        }
    )
    vision = VisionConfig.from_checkpoint(checkpoint)
    light: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0.1},
        "max_ongoing_requests": 256,
        "graceful_shutdown_timeout_s": drain_s,
    }
    apart, others = {}, light
    if others_on is not None:
        apart = {"max_replicas_per_node": 1}
        others = light | {"ray_actor_options": {"num_cpus": 0.1, "resources": {others_on: 0.01}}}
    # Three checks in a row that fail are what Serve waits for.
    encoder_app = serve.deployment(
        name="Encoder",
        num_replicas=encoders or replicas,
        health_check_period_s=0.5,
        request_router_config=routing(config.encoder_replica),
        **light,
        **apart,
    )(ControlledEncoder).bind(config)
    of_llm = others if llms is None else light | {"max_replicas_per_node": 1}
    llm = serve.deployment(
        name="LLM", num_replicas=llms or replicas, request_router_config=routing(config.llm), **of_llm
    )(StandInLLM).bind(config, vision.width, vision.spatial_merge_size)
    door = serve.deployment(name="Ingress", num_replicas=replicas, **others)(WatchedIngress)
    serve.run(door.bind(config, encoder_app, llm), name=name, route_prefix=f"/{name}")
    return ServedApp(cluster, name)


@pytest.fixture(scope="session")
def app(cluster: Cluster, checkpoints: dict[str, Path]) -> ServedApp:
    return deploy(cluster, checkpoints["qwen3_vl"], "app")
