"""What `vitray plan` prints to be run: a serve_config.yaml, or vLLM's own command. It must not know why."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import yaml

from deployments.check_config import IMPORT_PATH
from deployments.split_plan import Layout, Way

ENCODER_SHARE = 0.2
"""Of a shared GPU, of its memory above all: fractions bound what Ray places there and not who computes when."""


def config(model: str, layout: Layout, *, llm_gpus: int, budgets: Sequence[int] | None) -> str:
    """For encoders of their own, or such on shared GPUs; `budgets` of None are those of "auto".

    Raises ValueError for vLLM's own tower.
    """
    if layout.way is Way.AGGREGATED:
        raise ValueError("vLLM's own tower has no configuration here: encoders are what the application is")
    shared = layout.way is Way.SHARED
    llm: dict[str, object] = {"num_gpus": round(1 - ENCODER_SHARE, 2) if shared else llm_gpus}
    if llm_gpus > 1:
        llm["engine_args"] = {"tensor_parallel_size": llm_gpus}
    args = {
        "model": model,
        "encoder": {"encoder_cudagraph_token_budgets": list(budgets) if budgets else "auto"},
        "encoder_replica": {"num_gpus": ENCODER_SHARE if shared else 1},
        "llm": llm,
    }
    application = {
        "name": "vitray",
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": args,
        "deployments": [
            {"name": "Ingress", "num_replicas": layout.readers},
            {"name": "Encoder", "num_replicas": layout.encoders},
            {"name": "LLM", "num_replicas": layout.llms},
        ],
    }
    whole = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "request_timeout_s": 610},
        "applications": [application],
    }
    return yaml.safe_dump(whole, sort_keys=False, width=120, default_flow_style=None)


def vllm_command(model: str, layout: Layout, *, llm_gpus: int) -> str:
    """As many replicas behind one port."""
    words = ["vllm", "serve", model]
    if llm_gpus > 1:
        words += ["--tensor-parallel-size", str(llm_gpus)]
    if layout.llms > 1:
        words += ["--data-parallel-size", str(layout.llms)]
    if layout.readers > layout.llms:  # of itself there is one for each replica
        words += ["--api-server-count", str(layout.readers)]
    return shlex.join(words)
