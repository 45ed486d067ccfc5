"""Status reports of replicas: plain values, independent of the version of the caller."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from deployments.common.ray_private import replica_context
from encoder.packing.run_counts import RunCounts

Report = dict[str, JsonValue]

REPLICA = "replica"
"""Key of the replica's name in a report."""


def replica_name() -> str:
    """Returns Serve's name of the current replica; empty outside Serve."""
    return context.replica_tag if (context := replica_context()) else ""


def application_name() -> str:
    """Returns Serve's name of the current application; empty outside Serve."""
    return context.app_name if (context := replica_context()) else ""


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
