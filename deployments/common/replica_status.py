"""Status reports of replicas: plain values, independent of the version of the caller."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue
from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.common.ray_private import deployment_max_ongoing_requests
from encoder.packing.run_counts import RunCounts

Report = dict[str, JsonValue]

REPLICA = "replica"
"""Key of the replica's name in a report."""


def replica_name() -> str:
    """Returns Serve's name of the current replica; empty outside Serve."""
    try:
        return serve.get_replica_context().replica_tag
    except RayServeException:
        return ""


def application_name() -> str:
    """Returns Serve's name of the current application; empty outside Serve."""
    try:
        return serve.get_replica_context().app_name
    except RayServeException:
        return ""


def max_ongoing_requests() -> int:
    """Returns the limit of the current deployment; 0 outside Serve."""
    try:
        return deployment_max_ongoing_requests()
    except RayServeException:
        return 0


def encoder_report(name: str, stats: Mapping[str, float], runs: RunCounts, *, cached: int) -> Report:
    """`stats`: the values reported to Serve's autoscaler. `cached`: embeddings in the encoder cache."""
    return {
        REPLICA: name,
        **stats,
        "fusion_fallback": None if runs.fusion_fallback is None else runs.fusion_fallback.value,
        "cached_images": cached,
        "replays": runs.replays,
        "eager_runs": dict(runs.eager_runs),
        "encoded_tokens": runs.tokens,
        "replayed_tokens": runs.replayed_tokens,
        "padding_tokens": runs.padding_tokens,
    }


def llm_report(name: str, stats: Mapping[str, float]) -> Report:
    """`stats`: the values reported to Serve's autoscaler."""
    return {REPLICA: name, **stats}
