"""Servers that are compared end to end: applications with one rung of the ladder each, and vLLM alone.

All have one checkpoint and the same language model with the same limits, and run on one GPU at once, each with a share
of it, so that they can take turns. This module starts nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ladder.rungs import LABELS, RUNGS, RungUnavailableError, switches_of
from benchmarks.peers.vllm_tower import BUDGETS, MAX_IMAGES

MODEL = "bench"
"""The model name of every server, so that all accept the same requests."""
ENCODER_SHARE, LLM_SHARE = 0.02, 0.06
DECODE_WORKERS = 4
REQUEST_TIMEOUT_S = 240
VARIANT_RUNG = "fusion"
"""The rung that is also served with a language model without graphs, and with an ingress that queries encoders for
published embeddings too."""
_GPU_ENGINE: Mapping[str, Any] = {
    "max_model_len": 16384,
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 32,
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
    # vLLM's measurement of free memory is wrong while others allocate memory.
    "kv_cache_memory_bytes": 2 * 1024**3,
    # Graphs of whole decode steps and no compilation, which all engines would otherwise do at the same time.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    },
}
CPU_ENGINE: Mapping[str, Any] = {
    "enforce_eager": True,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Served:
    """One server. `rung`: of our ladder, None for vLLM alone."""

    name: str
    label: str
    rung: str | None
    llm_graphs: bool = True
    encoder_graphs: bool = False
    """For vLLM alone: `cudagraph_mm_encoder`."""
    processes: int = 1
    """For vLLM alone: the number of API server processes."""
    threads: int = 0
    """For vLLM alone: CPU threads of torch in each process; 0: torch's own choice."""
    embedding_directory: bool = True
    """For an application: whether an ingress remembers locations of embeddings, and then calls no encoder for them."""
    generic: bool = False
    """Whether the model has no tower of vitray: its encoder is vLLM's model class without the language model."""


def list_servers(
    rungs: Sequence[str] = RUNGS, *, gpu: bool, peers: bool, generic: bool = False
) -> tuple[list[Served], list[dict[str, str]]]:
    """Returns the servers, and the unavailable ones with the reason for each. `generic`: see `Served`."""
    made: list[Served] = []
    skipped: list[dict[str, str]] = []
    for rung in rungs:
        try:
            switches_of(rung)
        except RungUnavailableError as error:
            skipped.append({"name": rung, "reason": str(error)})
        else:
            made.append(Served(rung, f"generic encoder, {rung}" if generic else LABELS[rung], rung))
    if gpu and any(one.rung == VARIANT_RUNG for one in made):
        without = f"{LABELS[VARIANT_RUNG]}, language model without graphs"
        made.append(Served(f"{VARIANT_RUNG}-llm-eager", without, VARIANT_RUNG, llm_graphs=False))
        made.append(
            Served(
                f"{VARIANT_RUNG}-asking",
                f"{LABELS[VARIANT_RUNG]}, encoders always asked",
                VARIANT_RUNG,
                embedding_directory=False,
            )
        )
    if peers:
        made.append(Served("vllm", "vLLM alone, encoder launched", None))
        if gpu:
            made.append(Served("vllm-graphs", "vLLM alone, encoder graphs", None, encoder_graphs=True))
            one_thread = "vLLM alone, encoder graphs, one CPU thread"
            made.append(Served("vllm-1thread", one_thread, None, encoder_graphs=True, threads=1))
            made.append(Served("vllm-4api", "vLLM alone, four API processes", None, processes=4))
    return [replace(one, generic=generic) for one in made], skipped


def engine_args(served: Served, *, gpu: bool) -> dict[str, Any]:
    """Returns vLLM's engine arguments, for the application's engine and for vLLM alone."""
    args: dict[str, Any] = {"served_model_name": [MODEL], **(_GPU_ENGINE if gpu else CPU_ENGINE)}
    if not served.llm_graphs:
        del args["compilation_config"]
        args["enforce_eager"] = True
    if served.encoder_graphs:
        args["compilation_config"] = {
            **args["compilation_config"],
            "cudagraph_mm_encoder": True,
        }
        if not served.generic:
            args["compilation_config"] |= {
                "encoder_cudagraph_token_budgets": BUDGETS,
                "encoder_cudagraph_max_vision_items_per_batch": MAX_IMAGES,
            }
    return args


def encoder_settings(served: Served) -> dict[str, object]:
    """Returns an application's settings of its encoder. A generic one has vLLM's graphs, or none."""
    assert served.rung is not None
    switches = switches_of(served.rung)
    if not served.generic:
        return switches
    return {"implementation": "vllm", "cudagraph_mm_encoder": switches["cudagraph_mm_encoder"]}


def serve_config(
    all_served: Sequence[Served], checkpoint: Path, *, gpu: bool, port: int, cache_dir: Path | None = None
) -> dict[str, Any]:
    """Returns a serve_config with an application per rung. `cache_dir`: of all encoders, for compiled kernels.

    Encoders are started by the first image, one at a time, so that each has the GPU alone: its measurements at start-up
    decide what it replays.
    """
    kept: dict[str, object] = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
    applications = []
    for served in all_served:
        if served.rung is None:
            continue
        settings = encoder_settings(served)
        applications.append(
            {
                "name": served.name,
                "route_prefix": f"/{served.name}",
                "import_path": "deployments.app:build_app",
                "logging_config": {"enable_access_log": False},  # as in serve_config.yaml
                "args": {
                    "model": str(checkpoint),
                    "encoder": settings | kept if gpu else {**settings, "warm_image_sizes": []},
                    "encoder_replica": {
                        "num_gpus": ENCODER_SHARE if gpu else 0,
                        "num_cpus": 0.1,
                        "decode_workers": DECODE_WORKERS if gpu else 1,
                    },
                    "llm": {
                        "num_gpus": LLM_SHARE if gpu else 0,
                        "num_cpus": 0.1,
                        "engine_args": engine_args(served, gpu=gpu),
                    },
                    "ingress": {"num_cpus": 0.05, "request_timeout_s": REQUEST_TIMEOUT_S}
                    | ({} if served.embedding_directory else {"embedding_directory_entries": 0}),
                },
                "deployments": [
                    {"name": "Ingress", "num_replicas": 1, "max_ongoing_requests": 1024},
                    {
                        "name": "Encoder",
                        "max_ongoing_requests": 512,
                        "autoscaling_config": {
                            "min_replicas": 0,
                            "initial_replicas": 0,
                            "max_replicas": 1,
                            "target_ongoing_requests": 512,
                            "upscale_delay_s": 0,
                            "downscale_delay_s": 3600,
                        },
                    },
                    {"name": "LLM", "num_replicas": 1, "max_ongoing_requests": 256},
                ],
            }
        )
    return {
        "http_options": {"host": "127.0.0.1", "port": port, "request_timeout_s": REQUEST_TIMEOUT_S + 10},
        "applications": applications,
    }


def vllm_command(served: Served, checkpoint: Path, *, gpu: bool, port: int) -> list[str]:
    """Returns the command of vLLM's own server with its own tower."""
    args = {**engine_args(served, gpu=gpu), "served_model_name": MODEL}
    if gpu:
        args["gpu_memory_utilization"] = LLM_SHARE
    else:
        args["skip_mm_profiling"] = True
    return api_server(checkpoint, port, args, processes=served.processes)


def api_server(checkpoint: Path, port: int, args: Mapping[str, Any], *, processes: int = 1) -> list[str]:
    """Returns the command of vLLM's own server on this machine.

    Args:
        args: its options, by the names of `engine_args`.
        processes: the number of API server processes; vLLM's default is one.
    """
    # Modules instead of the `vllm` command, which is missing if vLLM is in a folder of PYTHONPATH.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    if processes > 1:
        command = [sys.executable, "-m", "benchmarks.peers.vllm_serve", "serve", "--api-server-count", str(processes)]
    fixed = {"model": checkpoint, "host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    for name, value in {**fixed, **args}.items():
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


def vllm_environment(served: Served) -> dict[str, str]:
    """Returns variables for vLLM alone. Its newer model runner, the default, has no encoder graphs."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if served.encoder_graphs else {}
    return runner | ({"OMP_NUM_THREADS": str(served.threads)} if served.threads else {})
