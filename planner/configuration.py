"""Renders a chosen layout of `vitray plan` as a serve_config.yaml or as a vLLM command."""

from __future__ import annotations

import shlex

import yaml

from deployments.common import names
from planner.model import Layout, Placement

ENCODER_SHARE = 0.2
"""Encoder's fraction of a shared GPU, chosen by memory: fractions bound Ray's placement, not the use of compute."""


def serve_config(model: str, layout: Layout, *, llm_gpus: int) -> str:
    """Returns the serve_config.yaml of a split or shared layout.

    Raises ValueError for an aggregated one.
    """
    if layout.placement is Placement.AGGREGATED:
        raise ValueError("an aggregated layout has no configuration: it runs vLLM without encoders of vitray")
    shared = layout.placement is Placement.SHARED
    llm: dict[str, object] = {"num_gpus": round(1 - ENCODER_SHARE, 2) if shared else llm_gpus}
    if llm_gpus > 1:
        llm["engine_args"] = {"tensor_parallel_size": llm_gpus}
    args = {
        "model": model,
        "encoder_replica": {"num_gpus": ENCODER_SHARE if shared else 1},
        "llm": llm,
    }
    application = {
        "name": "vitray",
        "route_prefix": "/",
        "import_path": names.IMPORT_PATH,
        "args": args,
        "deployments": [
            {"name": names.INGRESS, "num_replicas": layout.cpu_processes},
            {"name": names.ENCODER, "num_replicas": layout.encoders},
            {"name": names.LLM, "num_replicas": layout.llms},
        ],
    }
    whole = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "request_timeout_s": 610},
        "applications": [application],
    }
    return yaml.safe_dump(whole, sort_keys=False, width=120, default_flow_style=None)


def vllm_command(model: str, layout: Layout, *, llm_gpus: int) -> str:
    """Returns the vLLM command of an aggregated layout: all replicas behind one port."""
    words = ["vllm", "serve", model]
    if llm_gpus > 1:
        words += ["--tensor-parallel-size", str(llm_gpus)]
    if layout.llms > 1:
        words += ["--data-parallel-size", str(layout.llms)]
    if layout.cpu_processes > layout.llms:  # vLLM's default is one per replica
        words += ["--api-server-count", str(layout.cpu_processes)]
    return shlex.join(words)
