"""The servers that `bench_goodput.py` compares: an application on some GPUs, and a vLLM server with its own tower on
each.

Both have the same language model and KV cache size. A vLLM server and a replica of the application share each GPU and
take turns. This module starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.vllm_tower import MAX_IMAGES
from benchmarks.serving.plan import CPU_ENGINE, MODEL, REQUEST_TIMEOUT_S, api_server

NAME = "vitray"
PEER = "vllm"
SHARED_ENCODER, SHARED_LLM = 0.2, 0.8
"""Shares of one GPU for encoder and language model if they share it."""
MEMORY_SHARE = 0.3
"""Share of the memory of a GPU or part that vLLM requires to be free at its start; it uses what `kv_gib` determines."""
GIB = 2**30
MAX_NUM_SEQS = 256
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
"""Numbers of sequences of decode steps with a CUDA graph; larger steps run without one."""
SHARED_GIB = 16
"""Shared memory of an encoder: `documents.jsonl` at several requests per second fills up to 6 GiB."""
_LLM = {"num_hidden_layers": 36, "vocab_size": 151_936, "max_position_embeddings": 65_536}
MODELS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "8b": ("qwen3_vl", {**_LLM, "intermediate_size": 12_288}),
    "4b": ("qwen3_vl_2b", {**_LLM, "intermediate_size": 9_728, "hidden_size": 2_560, "num_attention_heads": 32}),
}
"""By size, the tower's name in `benchmarks/ladder/towers.py` and the language model's configuration, where it is not
the one that goes with that tower (Qwen/Qwen3-VL-8B-Instruct and Qwen3-VL-4B-Instruct, config.json)."""
PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
"""Bounds on the pixels of a picture in the published preprocessor."""


@dataclass(frozen=True)
class PeerSet:
    """Identical vLLM servers, one on each GPU."""

    name: str
    batched_tokens: int
    """`max_num_batched_tokens`."""
    processes: int
    """API server processes of each server."""
    threads: int = 0
    """CPU threads of torch in each process; 0: torch's own choice."""

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}


@dataclass(frozen=True)
class Fleet:
    """The GPUs and their assignment."""

    gpus: int
    encoders: int
    """Number of GPUs for encoders; the others are for language models, unless they share."""
    batched_tokens: int
    """`max_num_batched_tokens` of the application's language models."""
    peer_batched_tokens: tuple[int, ...]
    """`max_num_batched_tokens` of the vLLM servers; each value makes a set of servers."""
    ingresses: int
    decode_workers: int
    kv_gib: float
    """KV cache of each engine in GiB."""
    peer_processes: tuple[int, ...] = (1,)
    """API server processes of a vLLM server; each value makes a set of servers."""
    peer_threads: tuple[int, ...] = (0,)
    """`PeerSet.threads` of a vLLM server; each value makes a set of servers."""
    shared: bool = False
    """Every GPU has a language model, and at most one encoder that shares it; always so with a single GPU."""
    max_num_seqs: int = MAX_NUM_SEQS
    """`max_num_seqs` of each engine, and `max_ongoing_requests` of the application's language models."""
    parts: int = 1
    """Number of parts of each GPU (`benchmarks/serving/gpu_parts.py`); all numbers of GPUs count parts then."""
    videos: bool = False
    """Whether requests may have a video."""
    gpu: bool = True
    """If false, small models run on the CPU, one of each kind."""

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
            PeerSet(
                f"{PEER}-{tokens}"
                + (f"-{processes}api" if processes > 1 else "")
                + (f"-{threads}threads" if threads else ""),
                tokens,
                processes,
                threads,
            )
            for tokens in self.peer_batched_tokens
            for processes in self.peer_processes
            for threads in self.peer_threads
        ]


def engine_args(fleet: Fleet, batched_tokens: int) -> dict[str, Any]:
    """Returns vLLM's engine arguments."""
    args: dict[str, Any] = {"served_model_name": [MODEL], "max_num_batched_tokens": batched_tokens}
    if not fleet.gpu:
        return {**args, **CPU_ENGINE, "num_gpu_blocks_override": 256}
    return args | {
        "max_model_len": 32_768,
        "max_num_seqs": fleet.max_num_seqs,
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": int(fleet.videos)},
        "gpu_memory_utilization": MEMORY_SHARE / fleet.parts,
        # vLLM's measurement of free memory is wrong while others allocate memory.
        "kv_cache_memory_bytes": int(fleet.kv_gib * GIB),
        # Graphs of decode steps and no compilation, which all engines would otherwise do at the same time.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [size for size in GRAPH_SIZES if size <= fleet.max_num_seqs],
        },
    }


def serve_config(fleet: Fleet, checkpoint: Path, *, port: int, cache_dir: Path) -> dict[str, Any]:
    """Returns a serve_config of the application with every replica started at once."""
    encoder: dict[str, Any] = {"cache_dir": str(cache_dir)} if fleet.gpu else {"warm_image_sizes": []}
    encoder_gpus, llm_gpus = (SHARED_ENCODER, SHARED_LLM) if fleet.shares else (1, 1)
    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "deployments.app:build_app",
        "logging_config": {"enable_access_log": False},  # as in serve_config.yaml
        "args": {
            "model": str(checkpoint),
            "encoder": encoder,
            "encoder_replica": {
                "num_gpus": encoder_gpus / fleet.parts if fleet.gpu else 0,
                "num_cpus": 0.1,
                "decode_workers": fleet.decode_workers,
                **({"embedding_shm_bytes": SHARED_GIB * GIB} if fleet.gpu else {}),
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
            {"name": "LLM", "num_replicas": fleet.llms, "max_ongoing_requests": fleet.max_num_seqs},
        ],
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": port, "request_timeout_s": REQUEST_TIMEOUT_S + 10},
        "applications": [application],
    }


def vllm_command(fleet: Fleet, checkpoint: Path, peer: PeerSet, *, port: int) -> list[str]:
    """Returns the command of vLLM's own server with its own tower."""
    args = engine_args(fleet, peer.batched_tokens) | {"served_model_name": MODEL}
    if not fleet.gpu:
        args["skip_mm_profiling"] = True
    return api_server(checkpoint, port, args, processes=peer.processes)


def balancer_config(port: int, ports: Sequence[int]) -> str:
    """Returns HAProxy's configuration. A request goes to the server with the fewest, and each token is forwarded
    immediately as by Serve's HAProxy: without `http-no-delay`, small chunks wait for more, up to 0.2 s.
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
    """Sets the published bounds in the checkpoint's preprocessor; a small checkpoint has those of small pictures."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"size": PIXELS}, indent=2))
