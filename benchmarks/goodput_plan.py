"""What `bench_goodput.py` compares: an application on some GPUs, and as many vLLM servers, each with its own tower.

Both have the same language model with the same room for KV cache; a vLLM server and a replica of the application share
each GPU, and are asked in turn. Pure: it starts nothing and must not know how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_vllm import MAX_IMAGES
from benchmarks.serving_plan import CPU_ENGINE, MODEL, REQUEST_TIMEOUT_S, api_server

NAME = "vitray"
PEER = "vllm"
SHARED_ENCODER, SHARED_LLM = 0.2, 0.8
"""Of one GPU, where encoder and language model share it."""
MEMORY_SHARE = 0.3
"""Of a GPU's or its part's memory, which vLLM wants to find free; how much it takes is `kv_gib`."""
GIB = 2**30
SHARED_GIB = 16
"""Shared memory of an encoder: `documents.jsonl` at several requests a second has up to 6 GiB in it."""
LLM_8B = {
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "vocab_size": 151_936,
    "max_position_embeddings": 65_536,
}
"""Of Qwen3-VL-8B's language model, beside its width and heads (Qwen/Qwen3-VL-8B-Instruct, config.json)."""
PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
"""Of a picture, as the published preprocessor has it."""


@dataclass(frozen=True)
class PeerSet:
    """vLLM servers that are alike, one on each GPU."""

    name: str
    batched_tokens: int
    """`max_num_batched_tokens`."""
    processes: int
    """That read requests and write answers, of each server."""


@dataclass(frozen=True)
class Fleet:
    """The GPUs and who has them."""

    gpus: int
    encoders: int
    """Of the GPUs; the others have language models, unless they share."""
    batched_tokens: int
    """`max_num_batched_tokens` of the application's language models."""
    peer_batched_tokens: tuple[int, ...]
    """The same of the vLLM servers; more than one: as many sets of servers."""
    ingresses: int
    decode_workers: int
    kv_gib: float
    """KV cache of each engine."""
    peer_processes: tuple[int, ...] = (1,)
    """API processes of a vLLM server; more than one number: as many sets of servers."""
    shared: bool = False
    """Every GPU has a language model, and encoders share them, one a GPU at most; of one GPU always."""
    parts: int = 1
    """That each GPU is cut into (`benchmarks/gpu_parts.py`); all numbers of GPUs are of parts then."""
    gpu: bool = True
    """Without: small models on the CPU, one of each kind."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"{self.gpus} GPUs; at least one is needed")
        if self.encoders < 1 or self.encoders > (self.gpus if self.shares else self.gpus - 1):
            raise ValueError(
                f"{self.encoders} encoders on {self.gpus} GPUs: each side needs one, a GPU has one at most"
            )
        if self.parts < 1 or self.gpus % self.parts:
            raise ValueError(f"{self.gpus} parts are no number of GPUs of {self.parts} parts")

    @property
    def shares(self) -> bool:
        return self.shared or self.gpus == 1

    @property
    def llms(self) -> int:
        return self.gpus if self.shares else self.gpus - self.encoders

    def peers(self) -> list[PeerSet]:
        return [
            PeerSet(f"{PEER}-{tokens}" + (f"-{processes}api" if processes > 1 else ""), tokens, processes)
            for tokens in self.peer_batched_tokens
            for processes in self.peer_processes
        ]


def engine_args(fleet: Fleet, batched_tokens: int) -> dict[str, Any]:
    """vLLM's own names."""
    args: dict[str, Any] = {"served_model_name": [MODEL], "max_num_batched_tokens": batched_tokens}
    if not fleet.gpu:
        return {**args, **CPU_ENGINE, "num_gpu_blocks_override": 256}
    return args | {
        "max_model_len": 32_768,
        "max_num_seqs": 128,
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
        "gpu_memory_utilization": MEMORY_SHARE / fleet.parts,
        # Measuring what is free while others take memory goes wrong.
        "kv_cache_memory_bytes": int(fleet.kv_gib * GIB),
        # Graphs of decoding steps and nothing compiled: engines that start side by side would all compile at once.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128],
        },
    }


def serve_config(fleet: Fleet, checkpoint: Path, *, port: int, state_folder: Path) -> dict[str, Any]:
    """A serve_config of the application, every replica up from the start."""
    encoder: dict[str, Any] = {"state_folder": str(state_folder)} if fleet.gpu else {"warm_grids": []}
    encoder_gpus, llm_gpus = (SHARED_ENCODER, SHARED_LLM) if fleet.shares else (1, 1)
    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "deployments.app:build_app",
        "args": {
            "model": str(checkpoint),
            "encoder": encoder,
            "encoder_replica": {
                "num_gpus": encoder_gpus / fleet.parts if fleet.gpu else 0,
                "num_cpus": 0.1,
                "decode_workers": fleet.decode_workers,
                **({"shared_embedding_bytes": SHARED_GIB * GIB} if fleet.gpu else {}),
            },
            "llm": {
                "num_gpus": llm_gpus / fleet.parts if fleet.gpu else 0,
                "num_cpus": 0.1,
                "engine_args": engine_args(fleet, fleet.batched_tokens),
            },
            "ingress": {"num_cpus": 0.05, "request_timeout_s": REQUEST_TIMEOUT_S},
        },
        "deployments": [
            {"name": "Ingress", "num_replicas": fleet.ingresses, "max_ongoing_requests": 1024},
            {
                "name": "Encoder",
                "max_ongoing_requests": 512,
                "autoscaling_config": {"min_replicas": fleet.encoders, "max_replicas": fleet.encoders},
            },
            {"name": "LLM", "num_replicas": fleet.llms, "max_ongoing_requests": 256},
        ],
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": port, "request_timeout_s": REQUEST_TIMEOUT_S + 10},
        "applications": [application],
    }


def vllm_command(fleet: Fleet, checkpoint: Path, peer: PeerSet, *, port: int) -> list[str]:
    """vLLM's own server with its own tower."""
    args = engine_args(fleet, peer.batched_tokens) | {"served_model_name": MODEL}
    if not fleet.gpu:
        args["skip_mm_profiling"] = True
    return api_server(checkpoint, port, args, processes=peer.processes)


def balancer_config(port: int, ports: Sequence[int]) -> str:
    """HAProxy's configuration: a request goes to the server that has the fewest, and each token on at once, as Serve's
    HAProxy has it: without `http-no-delay` what is short waits for more, 0.2 s at most.
    """
    servers = "\n".join(f"  server vllm{number} 127.0.0.1:{one}" for number, one in enumerate(ports))
    return f"""\
defaults
  mode http
  option http-no-delay
  timeout connect 10s
  timeout client {REQUEST_TIMEOUT_S}s
  timeout server {REQUEST_TIMEOUT_S}s
listen vllm
  bind 127.0.0.1:{port}
  balance leastconn
{servers}
"""


def published_config(checkpoint: Path) -> None:
    """Gives the checkpoint's preprocessor the published bounds; a small checkpoint's are those of small pictures."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"size": PIXELS}, indent=2))
