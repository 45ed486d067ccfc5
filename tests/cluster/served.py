"""The application on a Ray cluster: how tests deploy it and reach its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from configs.schema import AppConfig
from tests.cluster.span_receiver import SpanReceiver

MAX_QUEUED_TOKENS = 200
RETRY_AFTER_S = 3
START_S = 120


@dataclass(frozen=True)
class Cluster:
    http_port: int
    metrics_port: int
    spans: SpanReceiver
    """Of requests whose client asks for a trace; no others are traced."""

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def exports_metrics(self) -> bool:
        try:
            return httpx.get(self.metrics_url, timeout=START_S).is_success
        except httpx.TransportError:
            return False


class ServedApp:
    """The application behind HTTP, and the handles by which a test reaches its replicas."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        from ray import serve

        self.url = f"http://127.0.0.1:{cluster.http_port}/{name}"
        self._metrics_url = cluster.metrics_url
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

    def llm(self, method: str, **arguments: object) -> Any:
        return getattr(self._llm, method).remote(**arguments).result(timeout_s=START_S)

    def llms(self, method: str) -> list[Any]:
        """Of each language model replica."""
        return list(self._llm.broadcast(method).results(timeout_s=START_S))

    def ingress(self, method: str) -> Any:
        return getattr(self._ingress, method).remote().result(timeout_s=START_S)

    def exported(self, deployment: str) -> dict[str, float]:
        """What Ray's metrics port shows of ours for a deployment, its replicas added up; names without `ray_`."""
        found: dict[str, float] = {}
        for line in httpx.get(self._metrics_url, timeout=START_S).text.splitlines():
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
    llm: dict[str, object] | None = None,
    drain_s: float = 20.0,
    others_on: str | None = None,
    encoders_on: str | None = None,
    stores: bool = False,
    patient: bool = True,
    **encoder: object,
) -> ServedApp:
    """The application under `/name`, routed as `build_app` has it, with so many replicas of each deployment.

    `encoder`, `ingress` and `llm`: settings of `encoder_replica`, `ingress` and `llm` that differ.
    `drain_s`: what a replica that is to go has to end its answers. `others_on`: a resource of the nodes that all but
    the encoders run on, of which there is one a node then. `llms`: so many, one a node, wherever the others are.
    `encoders_on`: a resource of the nodes that encoders run on. `stores`: responses. `patient`: no call is made again
    because a replica stands still for a moment, neither the ingress's nor those of this process.
    """
    from ray import serve

    from deployments.app import routing
    from deployments.ingress.responses.store import ResponseStore
    from deployments.routing import replica_router
    from encoder.checkpoint.vision_config import VisionConfig
    from tests.cluster.controlled import ControlledEncoder
    from tests.cluster.stand_in_llm import StandInLLM
    from tests.cluster.watched import PATIENT_ACCEPT_S, ImpatientIngress, WatchedIngress

    if patient:
        replica_router.ACCEPT_S = PATIENT_ACCEPT_S
    config = AppConfig.model_validate(
        {
            "model": str(checkpoint),
            "encoder_replica": {
                "decode_workers": 1,
                "max_queued_tokens": MAX_QUEUED_TOKENS,
                "num_gpus": 0,
                **encoder,
            },
            "llm": {"num_gpus": 0, **(llm or {})},
            "ingress": {"retry_after_s": RETRY_AFTER_S, **(ingress or {})},
        }
    )
    vision = VisionConfig.from_checkpoint(checkpoint)
    light: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0.1},
        "max_ongoing_requests": 256,
        "graceful_shutdown_timeout_s": drain_s,
    }
    apart: dict[str, Any] = {}
    others = light
    if others_on is not None:
        apart = {"max_replicas_per_node": 1}
        others = light | {"ray_actor_options": {"num_cpus": 0.1, "resources": {others_on: 0.01}}}
    encoders_there: dict[str, Any] = light
    if encoders_on is not None:
        encoders_there = light | {"ray_actor_options": {"num_cpus": 0.1, "resources": {encoders_on: 0.01}}}
    # Three checks in a row that fail are what Serve waits for.
    encoder_app = serve.deployment(
        name="Encoder",
        num_replicas=encoders or replicas,
        health_check_period_s=0.5,
        request_router_config=routing(config.encoder_replica),
        **encoders_there,
        **apart,
    )(ControlledEncoder).bind(config)
    of_llm = others if llms is None else light | {"max_replicas_per_node": 1}
    llm_app = serve.deployment(
        name="LLM",
        num_replicas=llms or replicas,
        health_check_period_s=0.5,
        request_router_config=routing(config.llm),
        **of_llm,
    )(StandInLLM).bind(config, vision.width)
    door_class = WatchedIngress if patient else ImpatientIngress
    door = serve.deployment(name="Ingress", num_replicas=replicas, **others)(door_class)
    store = serve.deployment(name="ResponseStore", **light)(ResponseStore)
    limits = config.ingress
    bound = {"store": store.bind(limits.stored_responses_bytes, limits.stored_responses_ttl_s)} if stores else {}
    serve.run(door.bind(config, llm=llm_app, encoder=encoder_app, **bound), name=name, route_prefix=f"/{name}")
    return ServedApp(cluster, name)
