"""Throughput of encoders behind Ray Serve and HTTP: `python benchmarks/bench_encoders.py --gpus 1,2`.

Runs the application's own ingress, routing and encoder replicas, with one GPU each, behind Serve's HAProxy; a stand-in
for vLLM receives every embedding and answers immediately (`benchmarks/simulation/stand_in_app.py`). Clients keep a
fixed number of requests in flight and send unique JPEG files: photos of one size, and with `--trace` the requests of a
trace. The library alone is measured on one GPU with photos of that size in a separate process (`bench_decode.py`),
which shows the cost of Serve and HTTP and how linearly throughput scales with encoders. The last line on stdout is
JSON. Needs Ray with HAProxy; `--tiny` runs without a GPU, on a small model.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from benchmarks.bench_decode import make_photos
from benchmarks.record import ROOT, gpu, provenance, save, write
from benchmarks.serving.busy import Busy
from benchmarks.serving.own_serve import own_serve
from benchmarks.trace.client import session
from benchmarks.trace.images import make_images
from benchmarks.trace.requests import read_trace

NAME = "encoders"
REQUEST_S = 120.0
MAX_IMAGES = 16
TRACE_REQUESTS = 200
"""Requests of a trace that are sent; its pictures repeat, as different files."""
PROCESSES = {
    "encoder": f"ServeReplica:{NAME}:Encoder",
    "ingress": f"ServeReplica:{NAME}:Ingress",
    "stand-in": f"ServeReplica:{NAME}:LLM",
    "proxy": "ProxyActor",
    "haproxy": "haproxy",
    "raylet": "raylet",
    "client": "multiprocessing.spawn",
}
"""Processes whose CPU use is reported, by a part of their command lines."""
CLIENTS_START_S = 1.0
"""Seconds until the clients start to send."""
SUFFIX_BYTES = 10
"""Unique bytes after the end of a JPEG file, which decoders ignore and digests include."""


@dataclass(frozen=True)
class Load:
    """The requests of a client process."""

    url: str
    files: tuple[tuple[bytes, ...], ...]
    """JPEG files by request."""
    in_flight: int
    warm_s: float
    seconds: float
    first: int
    """Number of the client's first request; numbers are unique within a run."""


def request_body(files: Sequence[bytes], number: int) -> bytes:
    """Returns a chat with unique pictures. `number`: of the request."""
    parts = []
    for place, file in enumerate(files):
        own = (number * MAX_IMAGES + place).to_bytes(SUFFIX_BYTES, "big")
        url = "data:image/jpeg;base64," + base64.b64encode(file + own).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


async def drive(load: Load) -> tuple[int, int]:
    """Returns the number of images answered within the measured time, and of requests failed at any time."""
    numbers = itertools.count(load.first)
    began = time.perf_counter()
    done = failed = 0

    async def one_after_another(http: aiohttp.ClientSession) -> None:
        nonlocal done, failed
        while time.perf_counter() - began < load.warm_s + load.seconds:
            number = next(numbers)
            files = load.files[number % len(load.files)]
            body = request_body(files, number)
            try:
                headers = {"content-type": "application/json"}
                async with http.post(f"{load.url}/v1/chat/completions", data=body, headers=headers) as response:
                    await response.read()
                    good = response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                good = False
            failed += not good
            done += len(files) * (good and load.warm_s <= time.perf_counter() - began < load.warm_s + load.seconds)

    async with session(None, REQUEST_S) as http:
        await asyncio.gather(*(one_after_another(http) for _ in range(load.in_flight)))
    return done, failed


def client(load: Load) -> tuple[int, int]:
    """Runs `drive` in a client process."""
    return asyncio.run(drive(load))


def run_clients(loads: Sequence[Load]) -> tuple[float, int]:
    """Returns images per second of all clients together, and the number of failed requests."""
    with multiprocessing.get_context("spawn").Pool(len(loads)) as pool:
        found = pool.map(client, loads)
    return sum(done for done, _ in found) / loads[0].seconds, sum(failed for _, failed in found)


def schema(checkpoint: Path, encoders: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the application's configuration, without a cache, so that every picture is encoded."""
    on_gpu = not options.tiny
    return {
        "name": NAME,
        "route_prefix": "/",
        "import_path": "benchmarks.simulation.stand_in_app:build",
        "logging_config": {"enable_access_log": options.access_log},
        "args": {
            "model": str(checkpoint),
            "encoder_replica": {
                "num_gpus": 1 if on_gpu else 0,
                "num_cpus": 0.1,
                "decode_workers": options.decode_workers,
                "cache_bytes": 0,
            },
            "llm": {"num_gpus": 0, "num_cpus": 0.1},
            "ingress": {
                "num_cpus": 0.1,
                "embedding_directory_entries": 0,
                "max_visual_tokens_in_flight": 2**20,
                "max_images_in_flight": 4096,
                "max_requests_waiting": 4096,
            },
        },
        "deployments": [
            {"name": "Ingress", "num_replicas": options.ingresses * encoders, "max_ongoing_requests": 1024},
            {"name": "Encoder", "num_replicas": encoders},
            {"name": "LLM", "num_replicas": encoders},
        ],
    }


def measure_library(options: argparse.Namespace) -> dict[str, Any]:
    """Runs `bench_decode.py` on one GPU. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "benchmarks/bench_decode.py", "--arch", options.arch, "--side", str(options.side)]
    command += ["--workers", str(options.decode_workers), *(["--tiny"] if options.tiny else [])]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"bench_decode.py failed with {ran.returncode}: {ran.stderr[-500:]}")
    rows: dict[str, dict[str, Any]] = json.loads(ran.stdout.strip().splitlines()[-1])["archs"]
    return rows[options.arch]


def read_trace_files(path: Path) -> tuple[tuple[bytes, ...], ...]:
    """Returns the files of each request with pictures among the first TRACE_REQUESTS."""
    trace = read_trace(path).cut(TRACE_REQUESTS)
    with tempfile.TemporaryDirectory() as folder:
        made = {number: file.read_bytes() for number, file in make_images(trace, Path(folder)).items()}
    return tuple(tuple(made[image.id] for image in one.images) for one in trace.requests if one.images)


def measured(
    kind: str, files: tuple[tuple[bytes, ...], ...], url: str, encoders: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measures all clients together."""
    clients = options.ingresses * encoders
    each = -(-options.in_flight * encoders // clients)
    loads = [
        Load(url, files, each, options.warm_seconds, options.seconds, (encoders * 100 + number) * 10**9)
        for number in range(clients)
    ]
    with Busy(PROCESSES, options.warm_seconds + CLIENTS_START_S, max(options.seconds - CLIENTS_START_S, 0.5)) as busy:
        images_per_s, lost = run_clients(loads)
    return {"encoders": encoders, "kind": kind, "images_per_s": images_per_s, "failed": lost, "busy": busy.found}


def compare(rows: Sequence[dict[str, Any]], library_kind: str, library_images_per_s: float | None) -> None:
    """Adds to each row its ratio to the library, and to one encoder times their number, where these are known."""
    one = {row["kind"]: row["images_per_s"] for row in rows if row["encoders"] == 1}
    for row in rows:
        alone = library_images_per_s if row["kind"] == library_kind else None
        row["over_library"] = row["images_per_s"] / (alone * row["encoders"]) if alone else None
        row["linear"] = row["images_per_s"] / (one[row["kind"]] * row["encoders"]) if row["kind"] in one else None


def row_text(row: dict[str, Any]) -> str:
    parts = [f"{row['encoders']} encoders, {row['kind']}: {row['images_per_s']:.1f} images a second"]
    if row["over_library"] is not None:
        parts.append(f"{row['over_library']:.3f} of the library")
    if row["linear"] is not None:
        parts.append(f"{row['linear']:.3f} of linear")
    cores, gpus = {kind: of for kind, of in row["busy"].items() if kind != "gpus"}, row["busy"].get("gpus")
    parts += [f"{kind} {of['cores']:.2f} cores, a thread {of['busiest_thread']:.2f}" for kind, of in cores.items()]
    if gpus:
        parts.append(f"GPUs {gpus['busy']:.2f} busy, the idlest {gpus['idlest']:.2f}")
    return ", ".join([*parts, f"{row['failed']} requests failed"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Encoders behind Ray Serve and HTTP, as fast as they go.")
    parser.add_argument("--gpus", type=_counts, default=[1], help="numbers of encoders, such as 1,2,4")
    parser.add_argument("--arch", choices=("qwen3_vl", "qwen2_5_vl"), default="qwen3_vl")
    parser.add_argument("--side", type=int, default=1024, help="side of the photos in pixels")
    parser.add_argument("--distinct", type=int, default=16, help="number of generated photos; no file is sent twice")
    parser.add_argument(
        "--trace", type=Path, help="also send the requests with pictures of this trace, such as photos.jsonl"
    )
    parser.add_argument("--in-flight", type=int, default=96, help="requests in flight per encoder")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured seconds")
    parser.add_argument("--warm-seconds", type=float, default=5.0)
    parser.add_argument(
        "--decode-workers", type=int, default=10, help="decoder processes per encoder, and of the library"
    )
    parser.add_argument(
        "--ingresses", type=int, default=2, help="ingress replicas per encoder, and clients per encoder"
    )
    parser.add_argument("--no-library", action="store_true", help="do not measure the library")
    parser.add_argument("--serve-proxy", action="store_true", help="use Serve's own proxy instead of its HAProxy")
    parser.add_argument("--access-log", action="store_true", help="with Serve's access log, unlike serve_config.yaml")
    parser.add_argument("--tiny", action="store_true", help="a small model, without GPUs")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    return parser.parse_args(arguments)


def _counts(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1,2,4")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    os.environ.setdefault("PYTHONPATH", str(ROOT))  # Ray's workers inherit it
    wanted: dict[str, tuple[tuple[bytes, ...], ...]] = {
        f"{options.side}²": tuple((file,) for file in make_photos(options.side, options.distinct, seed=0))
    }
    if options.trace:
        wanted[options.trace.stem] = read_trace_files(options.trace)
    report: dict[str, Any] = {
        "benchmark": "encoders",
        "gpu": None if options.tiny else gpu(),
        "tiny": options.tiny,
        "arch": options.arch,
        "side": options.side,
        "decode_workers": options.decode_workers,
        "ingresses_an_encoder": options.ingresses,
        "in_flight_an_encoder": options.in_flight,
        "proxy": "Serve's" if options.serve_proxy else "Serve's HAProxy",
        "library": None if options.no_library else measure_library(options),
        "rows": [],
        **provenance(options.commit, arguments),
    }
    alone = None
    if report["library"]:
        alone, tower = (report["library"][of] for of in ("files_images_per_s", "tower_images_per_s"))
        print(f"the library alone: {alone:.1f} images a second from files, the tower {tower:.1f}", flush=True)
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        own_serve(
            request_timeout_s=REQUEST_S,
            haproxy=not options.serve_proxy,
            num_cpus=64,
            num_gpus=0 if options.tiny else max(options.gpus),
        ) as (url, deploy),
    ):
        checkpoint = ROOT / "models" / "scenes-8m"
        if not options.tiny:
            from benchmarks.serving.checkpoint import make_published

            checkpoint = make_published(options.arch, Path(folder) / options.arch)
        for encoders in options.gpus:
            deploy(schema(checkpoint, encoders, options))
            for kind, files in wanted.items():
                row = measured(kind, files, url, encoders, options)
                report["rows"].append(row)
                compare(report["rows"], f"{options.side}²", alone)
                failed += row["failed"]
                print(row_text(row), flush=True)
                if options.out is not None:
                    save(report, options.out)
    write(report, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
