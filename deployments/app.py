"""Builds the application: `serve run serve_config.yaml` calls `build_app`. Only this file binds deployments."""

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
from deployments.common import names
from deployments.common.ray_private import autoscaler_resources
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.ingress.deployment import Ingress
from deployments.ingress.responses.store import ResponseStore
from deployments.llm.deployment import LLM
from deployments.routing.serve_router import AffinityRouter
from deployments.vllm import compat
from encoder.graphs import compile_caches

# Defaults that `deployments:` of serve_config.yaml overrides. An encoder replica accepts many calls at once: they must
# wait in its own queue, where they are packed, rather than at the handles.
ENCODER_MAX_ONGOING = 512
LLM_MAX_ONGOING = 256
INGRESS_MAX_ONGOING = STORE_MAX_ONGOING = 1024
DRAIN_MARGIN_S = 10.0
NEVER_S = 1e10
"""Longer than the time since 1970, from which Serve's controller counts: it does not poll replicas for routing stats,
which routers ask for themselves and which it would send to all of them with each change."""


def build_app(args: AppConfig | dict[str, JsonValue]) -> Application:
    """Returns the application: Ingress, bound to LLM, to Encoder unless the language models encode images, and to
    ResponseStore unless responses are not stored.

    Args:
        args: the mapping under `args:` of serve_config.yaml; Serve passes it as a plain dict.

    Raises:
        pydantic.ValidationError, ValueError: a setting is unknown or out of range; the message names it.
    """
    config = resolve(AppConfig.model_validate(args), cluster_facts())
    if compat.is_installed():  # the head node of a cluster need not have it; the replicas check again
        own_tower = config.encoder.implementation == "none"
        compat.check_args(config.llm.engine_args, config.llm.server_args, own_tower=own_tower)
    # In an update or when scaling down, a replica stops once its answers have ended. Work that an encoder replica does
    # not finish is retried on another.
    drain_s = config.ingress.request_timeout_s + DRAIN_MARGIN_S
    llm = serve.deployment(
        name=names.LLM,
        ray_actor_options=resources(config.llm),
        max_ongoing_requests=LLM_MAX_ONGOING,
        request_router_config=routing(config.llm),
        graceful_shutdown_timeout_s=drain_s,
    )(LLM)
    ingress = serve.deployment(
        name=names.INGRESS,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        max_ongoing_requests=INGRESS_MAX_ONGOING,
        # Serve's proxy rejects requests beyond `max_queued_requests`, if it is set, before they reach the ingress.
        backpressure_config=BackpressureConfig(retry_after_s=config.ingress.retry_after_s),
        graceful_shutdown_timeout_s=drain_s,
    )(Ingress)
    # Ray places replicas in this order: language models first, then encoders, which use what is left of the GPUs. In
    # the opposite order, several encoders could share one GPU, and a language model would find none.
    bound: dict[str, Application] = {"llm": llm.bind(config)}
    if max_bytes := config.ingress.stored_responses_bytes:
        store = serve.deployment(
            name=names.RESPONSE_STORE,
            num_replicas=1,  # several would each know other responses
            ray_actor_options={"num_cpus": 0},
            max_ongoing_requests=STORE_MAX_ONGOING,
        )(ResponseStore)
        bound["store"] = store.bind(max_bytes, config.ingress.stored_responses_ttl_s)
    if config.encoder.implementation == "none":
        return ingress.bind(config, **bound)
    encoder = serve.deployment(
        name=names.ENCODER,
        ray_actor_options=resources(config.encoder_replica, compile_caches.environment(config.encoder.cache_dir)),
        max_ongoing_requests=ENCODER_MAX_ONGOING,
        request_router_config=routing(config.encoder_replica),
    )(EncoderReplica)
    return ingress.bind(config, **bound, encoder=encoder.bind(config))


def resources(
    replica: EncoderReplicaConfig | LLMConfig, environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Returns Ray's actor options of a replica with resolved settings. `environment`: variables of its process."""
    options: dict[str, object] = {"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus}
    if replica.accelerator_type is not None:
        options["accelerator_type"] = replica.accelerator_type
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options


def routing(replica: EncoderReplicaConfig | LLMConfig) -> RequestRouterConfig:
    """Returns the request router's configuration of a deployment."""
    return RequestRouterConfig(
        request_routing_stats_period_s=cast(Any, NEVER_S),
        request_router_class=cast(Any, AffinityRouter),
        request_router_kwargs={
            "by_key": replica.affinity,
            "load_factor": replica.affinity_load_factor,
            # An encoder replica serves cache hits without GPU work; every request is work for a language model.
            "separate_cache_hits": isinstance(replica, EncoderReplicaConfig),
            "refusable": isinstance(replica, EncoderReplicaConfig),
            "probe_min_cost": replica.load_probe_min_tokens if isinstance(replica, LLMConfig) else None,
        },
    )


def cluster_facts() -> ClusterFacts:
    """Returns facts of the running cluster, including nodes that its autoscaler can add."""
    possible = autoscaler_resources()
    return ClusterFacts(has_gpu=ray.cluster_resources().get("GPU", 0) > 0 or possible.get("GPU", 0) > 0)
