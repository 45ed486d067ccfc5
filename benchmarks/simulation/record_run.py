"""Records a run of the real application on fake GPUs: `python benchmarks/simulation/record_run.py --pieces
60x1.2,60x12,80x1.2`.

Ray, Serve, HTTP, the ingress, and encoders scaled by `VisualTokenPolicy` are real; the forward, which takes a set time,
and vLLM are stand-ins (`fake_gpus.py`). Requests arrive at random times at each piece's rate, regardless of earlier
answers. The record contains each request's delay, the replicas over time, and the inputs of
`benchmarks/simulation/predict_run.py`. The last line on stdout is JSON. Needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import numpy as np
from PIL import Image

from benchmarks.record import ROOT, provenance, write
from benchmarks.serving.own_serve import own_serve
from benchmarks.trace.client import session
from encoder.checkpoint.image_rules import ImageRules
from encoder.images.size import image_grid, num_tokens

NAME = "recorded"
MODEL = ROOT / "models" / "scenes-8m"
SIZES = ((160, 160), (256, 256), (384, 320))
"""Sizes of pictures, equally frequent; 25, 64 and 120 tokens."""
SECOND_IMAGE = 0.3
"""Share of requests with two pictures."""
ALONE = 12
"""Single requests before the run, which measure the time of an image outside the device."""
SAMPLE_S = 0.25
ALONE_WAIT_S = 60.0
"""Timeout of each of them."""
WAIT_S = 240.0
STATES = ("STARTING", "RUNNING", "STOPPING")


@dataclass
class Options:
    """A request: its due time in seconds from the start of the run, its images, and its result."""

    at_s: float
    sizes: tuple[tuple[int, int], ...]
    status: int = 0
    delay_s: float = 0.0
    """Seconds since it was due."""
    retry_after: bool = False
    sent_late_s: float = 0.0
    images_answered: int = 0
    error: str = ""
    """Error of the server or of the client if it was not answered."""


@dataclass
class Fleet:
    """Encoder replicas by state, at each sampled time."""

    rows: list[tuple[float, int, int, int]] = field(default_factory=list)


def pieces(text: str) -> list[tuple[float, float]]:
    """Parses `60x1.5,30x15`: 60 seconds of 1.5 requests per second, then 30 seconds of 15."""
    try:
        found = [(float(seconds), float(rate)) for seconds, rate in (part.split("x") for part in text.split(","))]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 60x1.5,30x15") from error
    if not all(seconds > 0 and rate > 0 for seconds, rate in found):
        raise argparse.ArgumentTypeError(f"{text!r}: seconds and requests a second must be over 0")
    return found


def requests_of(rates: Sequence[tuple[float, float]], seed: int) -> list[Options]:
    """Returns requests with Poisson arrivals."""
    chance = np.random.default_rng(seed)
    found: list[Options] = []
    began = 0.0
    for seconds, rate in rates:
        at_s = began + float(chance.exponential(1 / rate))
        while at_s < began + seconds:
            count = 2 if chance.random() < SECOND_IMAGE else 1
            found.append(Options(round(at_s, 4), tuple(SIZES[int(chance.integers(len(SIZES)))] for _ in range(count))))
            at_s += float(chance.exponential(1 / rate))
        began += seconds
    return found


def body(sizes: Sequence[tuple[int, int]], number: int) -> dict[str, Any]:
    """Returns a chat request with unique pictures."""
    parts = []
    for place, size in enumerate(sizes):
        picture = Image.new("RGB", size, (number % 256, number // 256 % 256, place))
        picture.putpixel((0, 0), (number // 65536, 255, 0))
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}]}


def tokens_of(sizes: Sequence[tuple[int, int]], rules: ImageRules) -> list[int]:
    return [num_tokens(image_grid(width, height, rules), rules.merge_size) for width, height in sizes]


async def ask(http: aiohttp.ClientSession, url: str, options: Options, number: int, began: float) -> None:
    content = body(options.sizes, number)
    await asyncio.sleep(began + options.at_s - time.monotonic())
    options.sent_late_s = time.monotonic() - began - options.at_s
    try:
        async with http.post(f"{url}/v1/chat/completions", json=content) as response:
            options.status, options.retry_after = response.status, "retry-after" in response.headers
            answer = await response.json()
            options.images_answered = len(answer.get("images", ()))
            options.error = "" if response.ok else str(answer)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        options.status = options.status if options.status not in (0, 200) else -1
        options.error = repr(error)
    options.delay_s = time.monotonic() - began - options.at_s


async def drive(url: str, run: Sequence[Options], fleet: Fleet) -> list[float]:
    """Sends all requests; returns the delays of the single requests before the run."""
    alone = [Options(0.0, ((256, 256),)) for _ in range(ALONE)]
    async with session(None, ALONE_WAIT_S) as http:
        for number, options in enumerate(alone):
            await ask(http, url, options, 2**20 + number, time.monotonic())
            if options.status != 200:
                raise RuntimeError(
                    f"request {number + 1} of {ALONE} before the run was answered with {options.status}, "
                    f"after {options.delay_s:.1f} s of at most {ALONE_WAIT_S:g}: {options.error}"
                )
    async with session(None, WAIT_S) as http:
        began = time.monotonic()
        watching = asyncio.create_task(asyncio.to_thread(watch, began, fleet, stop := threading.Event()))
        try:
            pending: list[asyncio.Task[None]] = []
            for number, options in enumerate(run):  # bodies are made three seconds before they are due
                await asyncio.sleep(began + options.at_s - 3 - time.monotonic())
                pending.append(asyncio.create_task(ask(http, url, options, number, began)))
            await asyncio.gather(*pending)
        finally:  # otherwise asyncio would wait for the thread after an error
            stop.set()
        await watching
    return [options.delay_s for options in alone[2:]]


def watch(began: float, fleet: Fleet, stop: threading.Event) -> None:
    """Records the number of replicas until `stop` is set."""
    while True:
        fleet.rows.append((round(time.monotonic() - began, 2), *replicas()))
        if stop.wait(SAMPLE_S):
            return


def replicas() -> tuple[int, int, int]:
    """Returns the numbers of starting, running and stopping encoders."""
    from ray import serve

    found = serve.status().applications[NAME].deployments["Encoder"].replica_states
    states = {str(getattr(state, "value", state)): number for state, number in found.items()}
    starting, running, stopping = (int(states.get(state, 0)) for state in STATES)
    return starting, running, stopping


def schema(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the application's configuration, as in a config file."""
    at_once = {"upscale_delay_s": 0, "downscale_delay_s": 0, "look_back_period_s": 5, "metrics_interval_s": 1}
    policy = {
        "policy_function": "deployments.scaling:VisualTokenPolicy",
        "policy_kwargs": {"target_encode_delay_s": options.target_s, **policy_arguments(options)},
    }
    bounds = {"min_replicas": options.min_replicas, "max_replicas": options.gpus}
    return {
        "name": NAME,
        "route_prefix": "/",
        "import_path": "benchmarks.simulation.fake_gpus:build",
        "args": {
            "model": str(MODEL),
            "tokens_per_s": options.tokens_per_s,
            "start_s": options.start_s,
            "batches_under_way": options.batches_under_way,
            "encoder": {
                "encoder_cudagraph_token_budgets": [options.batch_tokens],
                "encoder_cudagraph_max_images_per_batch": options.batch_images,
            },
            "encoder_replica": {"num_gpus": 1, "num_cpus": 0.1, "decode_workers": 1, "cache_bytes": 0},
            "ingress": {"max_visual_tokens_queued": options.tokens_waiting}
            | {"max_visual_tokens_in_flight": options.tokens_in_flight, "max_visual_tokens_per_request": 512},
        },
        "deployments": [{"name": "Encoder", "autoscaling_config": {**bounds, **at_once, "policy": policy}}],
    }


def policy_arguments(options: argparse.Namespace) -> dict[str, float]:
    return {
        "target_utilization": options.target_utilization,
        "max_scale_up_factor": options.max_scale_up_factor,
        "scale_down_stabilization_s": options.scale_down_stabilization_s,
    }


def record_run(options: argparse.Namespace, run: Sequence[Options]) -> tuple[Fleet, list[float]]:
    """Makes the run on a separate Ray and Serve."""
    for source in ("REPLICA", "HANDLE"):  # must precede the import of Serve's modules
        os.environ[f"RAY_SERVE_{source}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = str(options.report_s)
    fleet = Fleet()
    with own_serve(num_cpus=8, num_gpus=options.gpus, object_store_memory=150 * 2**20) as (url, deploy):
        deploy(schema(options))
        return fleet, asyncio.run(drive(url, run, fleet))


def starts_s(rows: Sequence[tuple[float, int, int, int]]) -> list[float]:
    """Returns each replica's start-up time, first in, first out. The newest starting replica is cancelled first."""
    begun: list[float] = []
    took: list[float] = []
    before = (0, rows[0][2])
    for at_s, starting, running, _ in rows:
        ready = max(0, running - before[1])
        came = starting - before[0] + ready
        begun = begun + [at_s] * came if came >= 0 else begun[:came]
        took += [at_s - begun.pop(0) for _ in range(min(ready, len(begun)))]
        before = (starting, running)
    return took


def changes(rows: Sequence[tuple[float, int, int, int]]) -> list[tuple[float, int, int, int]]:
    """Returns the rows that differ from the previous one, and the last."""
    new = [row for before, row in itertools.pairwise(rows) if row[1:] != before[1:]]
    return [rows[0], *new, *([rows[-1]] if new[-1:] != [rows[-1]] else [])]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A run of the real application on fake GPUs, recorded.")
    parser.add_argument("--pieces", type=pieces, default=pieces("60x1.2,60x12,80x1.2"), help="seconds x requests/s, …")
    parser.add_argument("--gpus", type=int, default=8, help="fake GPUs, one encoder each (default 8)")
    parser.add_argument("--min-replicas", type=int, default=2, help="minimum number of encoders (default 2)")
    parser.add_argument("--tokens-per-s", type=float, default=300.0, help="speed of one encoder (default 300)")
    parser.add_argument("--start-s", type=float, default=20.0, help="minimum start-up time of a replica (default 20)")
    parser.add_argument("--batches-under-way", type=int, default=2, help="batches in flight on a fake GPU (default 2)")
    parser.add_argument("--batch-images", type=int, default=4, help="maximum number of images per batch (default 4)")
    parser.add_argument(
        "--batch-tokens", type=int, default=256, help="maximum number of tokens per batch (default 256)"
    )
    parser.add_argument("--report-s", type=float, default=2.0, help="seconds between a replica's reports (default 2)")
    parser.add_argument("--target-s", type=float, default=1.0, help="target_encode_delay_s (default 1)")
    parser.add_argument("--target-utilization", type=float, default=0.5, help="default 0.5")
    parser.add_argument("--max-scale-up-factor", type=float, default=2.0, help="default 2")
    parser.add_argument("--scale-down-stabilization-s", type=float, default=30.0, help="default 30")
    parser.add_argument("--tokens-in-flight", type=int, default=131_072, help="as in serve_config.yaml (131072)")
    parser.add_argument("--tokens-waiting", type=int, default=524_288, help="as in serve_config.yaml (524288)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    run = requests_of(options.pieces, options.seed)
    fleet, alone_s = record_run(options, run)
    rules = ImageRules.from_checkpoint(MODEL)
    (tokens_alone,) = tokens_of([(256, 256)], rules)
    started = starts_s(fleet.rows)
    report = {
        "benchmark": "record_run",
        "pieces": options.pieces,
        "model": {
            "tokens_per_s": options.tokens_per_s,
            "start_s": round(statistics.median(started), 2) if started else options.start_s,
            "image_s": round(statistics.median(alone_s) - tokens_alone / options.tokens_per_s, 4),
            "report_s": options.report_s,
            "batches_under_way": options.batches_under_way,
            "batch_images": options.batch_images,
            "batch_tokens": options.batch_tokens,
        },
        "policy": {"target_encode_delay_s": options.target_s, **policy_arguments(options)},
        "min_replicas": options.min_replicas,
        "max_replicas": options.gpus,
        "machine": {
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[1], 1),  # mean of the last five minutes
            "sent_late_p99_s": round(float(np.percentile([one.sent_late_s for one in run], 99)), 3),
        },
        "starts_s": [round(seconds, 2) for seconds in started],
        "replicas": [" ".join(map(str, row)) for row in changes(fleet.rows)],
        "requests": [
            f"{one.at_s} {tokens} {one.status} {one.delay_s:.3f} {one.retry_after:d}"
            for one, tokens in ((one, ",".join(map(str, tokens_of(one.sizes, rules)))) for one in run)
        ],
        "answered_without_an_image": sum(one.status == 200 and one.images_answered != len(one.sizes) for one in run),
        **provenance(options.commit, arguments),
    }
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
