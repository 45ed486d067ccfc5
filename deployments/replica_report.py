"""What a replica tells of itself when it is asked: plain values, the same whatever version asks.

It must not know who asks, nor what is shown of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue
from ray import serve
from ray.serve.exceptions import RayServeException

from encoder.run_counts import RunCounts

Report = dict[str, JsonValue]

REPLICA = "replica"
"""The entry that holds the replica's name."""


def replica_name() -> str:
    """Serve's name of the replica that this runs in; empty outside of Serve."""
    try:
        return serve.get_replica_context().replica_tag
    except RayServeException:
        return ""


def encoder_report(name: str, stats: Mapping[str, float], runs: RunCounts, *, cached: int) -> Report:
    """`stats`: what Serve's autoscaling is told. `cached`: embeddings that are held."""
    return {
        REPLICA: name,
        **stats,
        "cached_images": cached,
        "replays": runs.replays,
        "eager_runs": dict(runs.eager_runs),
        "encoded_tokens": runs.tokens,
        "replayed_tokens": runs.replayed_tokens,
        "padding_tokens": runs.padding_tokens,
    }


def llm_report(name: str, stats: Mapping[str, float]) -> Report:
    """`stats`: what Serve's autoscaling is told."""
    return {REPLICA: name, **stats}
