"""Renders a chosen layout of `vitray plan` as a serve_config.yaml."""

from __future__ import annotations

import math

import yaml

from deployments.common import names
from planner.model import Layout, Placement

ENCODER_SHARE = 0.2
"""Encoder's fraction of a shared GPU, chosen by memory: fractions bound Ray's placement, not the use of compute."""


def serve_config(model: str, layout: Layout, *, llm_gpus: int) -> str:
    """Returns the serve_config.yaml of a layout; an aggregated one has no encoders."""
    aggregated = layout.placement is Placement.AGGREGATED
    shared = layout.placement is Placement.SHARED
    llm: dict[str, object] = {"num_gpus": round(1 - ENCODER_SHARE, 2) if shared else llm_gpus}
    if llm_gpus > 1:
        llm["engine_args"] = {"tensor_parallel_size": llm_gpus}
    args: dict[str, object] = {"model": model}
    if aggregated:  # requests are read by the ingress, and their images decoded by threads of the language models
        threads = math.ceil(layout.cpu_processes / layout.llms)
        args |= {"encoder": {"implementation": "none"}, "encoder_replica": {"decode_workers": threads}}
    else:
        args["encoder_replica"] = {"num_gpus": ENCODER_SHARE if shared else 1}
    args["llm"] = llm
    encoders = [] if aggregated else [{"name": names.ENCODER, "num_replicas": layout.encoders}]
    application = {
        "name": "vitray",
        "route_prefix": "/",
        "import_path": names.IMPORT_PATH,
        "args": args,
        "deployments": [
            {"name": names.INGRESS, "num_replicas": layout.cpu_processes},
            *encoders,
            {"name": names.LLM, "num_replicas": layout.llms},
        ],
    }
    whole = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "request_timeout_s": 610},
        "applications": [application],
    }
    return yaml.safe_dump(whole, sort_keys=False, width=120, default_flow_style=None)
