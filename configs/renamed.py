"""Former names of settings, scaling policies and their arguments, for errors that name their replacements."""

from __future__ import annotations

from collections.abc import Iterator

RENAMED = {
    # args.encoder
    "fusion": "fused_kernels",
    "capture": 'graph_capture ("startup" for eager, "on_demand" for lazy, "hybrid")',
    "warm_grids": "warm_image_sizes",
    "state_folder": "cache_dir",
    "fp8_min_token_cosine": "fp8_max_error (a multiple of bfloat16's error instead of a cosine)",
    "fp8_min_image_cosine": "fp8_max_error (a multiple of bfloat16's error instead of a cosine)",
    # args.encoder_replica and args.llm
    "shared_pixel_bytes": "pixel_shm_bytes",
    "shared_embedding_bytes": "embedding_shm_bytes",
    "load_bound": "affinity_load_factor",
    "begin_from_tokens": "early_prefill_min_tokens",
    "ask_from_tokens": "load_probe_min_tokens",
    "landing_bytes": "receive_buffer_bytes",
    "nixl_buffer_bytes": "receive_buffer_bytes",
    # args.ingress
    "max_answers_per_request": "max_completions_per_request",
    "max_visual_tokens_waiting": "max_visual_tokens_queued",
    "max_whereabouts": "embedding_directory_entries",
    "by_grpc": 'llm_transport ("grpc" for true, "ray" for false)',
    "page": "web_ui",
    "door": "ingress.auth and ingress.rate_limit",
    "door.authentication": "ingress.auth.mode",
    "door.api_keys_file": "ingress.auth.api_keys_file",
    "door.api_keys_variable": "ingress.auth.api_keys_env",
    "door.tenant_header": "ingress.auth.tenant_header",
    "door.management_routes": "ingress.auth.management_routes",
    "door.requests_per_minute": "ingress.rate_limit.requests_per_minute",
    "door.visual_tokens_per_minute": "ingress.rate_limit.visual_tokens_per_minute",
    "door.max_header_bytes": "ingress.max_header_bytes",
    # autoscaling_config.policy
    "deployments.scaling:VisualWork": "deployments.scaling:VisualTokenPolicy",
    "deployments.scaling:EngineWork": "deployments.scaling:EngineLoadPolicy",
    "busy_share": "target_utilization",
    "hold_s": "scale_down_stabilization_s",
    "growth": "max_scale_up_factor",
    "start_s": "replica_startup_s",
    "kv_cache_share": "target_kv_cache_utilization",
}
"""Former names to new names. A key of a section that moved is written `section.key`."""

REMOVED = {
    "hedge_after_s": "images are no longer sent to a second encoder; delete the line",
    **dict.fromkeys(
        ("fallback", "fallback_after_s", "fallback_max_images"),
        "language models no longer encode by themselves, images wait for an encoder; delete the line",
    ),
}
"""Removed keys, and what the operator should do instead."""


def describe_former_key(key: str, value: object = None) -> str | None:
    """Returns what replaced a former `key`, or the keys of the section `value`; None if it never was a key."""
    if key in REMOVED:
        return f"it was removed, {REMOVED[key]}"
    return "; ".join(_renamed(key, value)) or None


def _renamed(key: str, value: object) -> Iterator[str]:
    nested = [f"{key}.{name}" for name in value] if isinstance(value, dict) else []
    for former in [name for name in nested if name in RENAMED] or [key]:
        if former in RENAMED:
            yield f"{former} is now {RENAMED[former]}"
