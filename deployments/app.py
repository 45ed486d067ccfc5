"""The whole application in one function, `build_app`: what `serve run serve_config.yaml` calls. Only this file binds.

It must not know how anything works, only what there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import ray
from pydantic import JsonValue
from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig

from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig, EncoderReplicaConfig, LLMConfig
from deployments import vllm_compat
from deployments.affinity_router import AffinityRouter
from deployments.encoder import EncoderReplica
from deployments.ingress import Ingress
from deployments.llm import LLM
from encoder import compile_caches

# Bounds where `deployments:` of serve_config.yaml says nothing. The encoder takes many requests at once: they wait in
# its own queue, where they are packed, and not at the handles.
ENCODER_MAX_ONGOING = 512
LLM_MAX_ONGOING = 256
INGRESS_MAX_ONGOING = 1024
DRAIN_MARGIN_S = 10.0


def build_app(args: AppConfig | dict[str, JsonValue]) -> Application:
    """Ingress → Encoder → LLM.

    Args:
        args: what stands under `args:` in serve_config.yaml; Serve hands it over as a plain dict.

    Raises:
        pydantic.ValidationError, ValueError: a setting is unknown or out of range; the message names it.
    """
    config = resolve(AppConfig.model_validate(args), cluster_facts())
    if vllm_compat.is_installed():  # the head node of a cluster need not have it; the replicas check again
        vllm_compat.check_args(config.llm.engine_args, config.llm.server_args)
    # A replica that is to go ends when its answers have ended: in an update, or where there are to be fewer. What an
    # encoder does not finish is done again elsewhere.
    drain_s = config.ingress.request_timeout_s + DRAIN_MARGIN_S
    encoder = serve.deployment(
        name="Encoder",
        ray_actor_options=resources(config.encoder_replica, compile_caches.environment(config.encoder.state_folder)),
        max_ongoing_requests=ENCODER_MAX_ONGOING,
        request_router_config=routing(config.encoder_replica),
    )(EncoderReplica)
    llm = serve.deployment(
        name="LLM",
        ray_actor_options=resources(config.llm),
        max_ongoing_requests=LLM_MAX_ONGOING,
        request_router_config=routing(config.llm),
        graceful_shutdown_timeout_s=drain_s,
    )(LLM)
    ingress = serve.deployment(
        name="Ingress",
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        max_ongoing_requests=INGRESS_MAX_ONGOING,
        # What Serve's proxy answers where `max_queued_requests` is set and reached; the ingress never sees these.
        backpressure_config=BackpressureConfig(retry_after_s=config.ingress.retry_after_s),
        graceful_shutdown_timeout_s=drain_s,
    )(Ingress)
    # In this order Ray places them: language models take a GPU each, and then encoders what these leave of it. The
    # other way round several encoders would go to one GPU, and one language model nowhere.
    return ingress.bind(config, llm=llm.bind(config), encoder=encoder.bind(config))


def resources(
    replica: EncoderReplicaConfig | LLMConfig, environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Ray's actor options of a replica whose "auto" is resolved, and variables of its process."""
    options: dict[str, object] = {"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus}
    if replica.accelerator_type is not None:
        options["accelerator_type"] = replica.accelerator_type
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options


def routing(replica: EncoderReplicaConfig | LLMConfig) -> RequestRouterConfig:
    """How calls find their replica."""
    if not replica.affinity:
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class=cast(Any, AffinityRouter),
        request_router_kwargs={
            "load_bound": replica.load_bound,
            # An encoder gives what it has cached beside its work; to a language model every answer is work.
            "giving_apart": isinstance(replica, EncoderReplicaConfig),
            "ask_from": replica.ask_from_tokens if isinstance(replica, LLMConfig) else None,
        },
    )


def cluster_facts() -> ClusterFacts:
    """What the cluster has, or can get from its autoscaler."""
    possible = ray._private.state.state.get_max_resources_from_cluster_config() or {}
    return ClusterFacts(has_gpu=ray.cluster_resources().get("GPU", 0) > 0 or possible.get("GPU", 0) > 0)
