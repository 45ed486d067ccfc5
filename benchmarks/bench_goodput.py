"""Goodput of separate encoders and language models against vLLM servers: `python benchmarks/bench_goodput.py`.

Both use the same GPUs, or parts of them, and one checkpoint of Qwen3-VL-8B's shapes with random weights: the
application with encoders and language models on their own GPUs, and a vLLM server with its own tower on each GPU
behind HAProxy. All run at once and take turns, with another one first at each speed; the others are idle. Each speed
gets its own slices of the traces, so that no cache contains their pictures. One request with a small picture is also
repeated for one token with warm caches, which measures the overhead of the server. `--videos` measures requests with a
new video each, at full load. The last line on stdout is JSON. Needs Ray with HAProxy, vLLM and GPUs; `--tiny` runs
without one, on small models. Exits with 1 if a request failed or the client was late.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bench_serve
from benchmarks.goodput import answers as goodput_answers
from benchmarks.goodput import plan as goodput_plan
from benchmarks.goodput.options import parse
from benchmarks.goodput.plan import NAME, Fleet
from benchmarks.goodput.servers import peers, start_balancer
from benchmarks.ladder.measure import Deadline
from benchmarks.record import gpu, provenance, save, write
from benchmarks.serving import latency_client, videos
from benchmarks.serving.checkpoint import make_published
from benchmarks.serving.gpu_parts import split_gpu
from benchmarks.serving.latency_figures import stages, summary
from benchmarks.serving.plan import MODEL
from benchmarks.serving.servers import Peer, Servers, own_port
from benchmarks.trace import figures as trace_figures
from benchmarks.trace.client_pool import ClientPool
from benchmarks.trace.images import make_images
from benchmarks.trace.requests import Trace
from benchmarks.trace.run import Plan, Server, measure
from training.checkpoints import make_checkpoint

START_SHARE = 0.7
"""Maximum share of the time until all servers have started."""
STOP_S = 40.0
MAX_LAG_MS = 20.0
AGAIN_FIRST = 5
"""Number of the repeated requests that fill caches and are not counted."""
GOOD_SHARE = 0.9
"""Share of good requests at which a server sustains a speed."""


def measure_repeated(url: str, number: int) -> dict[str, Any]:
    """Returns the milliseconds of the same request, sent one at a time."""
    same = latency_client.body(MODEL, [(224, 224)], words=10, output_tokens=1, picture_seed=1, text_seed=1)
    answers = asyncio.run(latency_client.one_by_one(url, [same] * (AGAIN_FIRST + number)))[AGAIN_FIRST:]
    good = [answer for answer in answers if answer.ok]
    return {
        **(summary([1e3 * one.total_s for one in good]) or {}),
        "stages": stages([one.server_timing for one in good]),
        "failed": len(answers) - len(good),
    }


def measure_slice(
    trace: Trace, speed: float, servers: Sequence[Server], options: argparse.Namespace, folder: Path, pool: ClientPool
) -> dict[str, Any]:
    """Measures a slice of a trace at one speed."""
    plan = Plan(trace, speed, min(options.pieces, len(trace.requests)), 300.0, warm_ups=0, prepared=True)
    runs = asyncio.run(measure(plan, servers, make_images(trace, folder), lambda told: print(told, flush=True), pool))
    if options.answers is not None and speed != float("inf"):
        goodput_answers.append(options.answers, trace, speed, runs)
    found = bench_serve.report(plan, servers, runs, options.slo[0], MAX_LAG_MS)
    for server in servers:
        shares = trace_figures.goodput_shares(runs[server.label], options.slo)
        found["servers"][server.label]["goodput_shares"] = shares
        print(f"{server.label}, {trace.name}, {speed:g} times as fast", flush=True)
        print(trace_figures.text(found["servers"][server.label]), flush=True)
        print(f"good: {shares}", flush=True)
    return found


def slice_duration_s(trace: Trace, speed: float, num_servers: int) -> float:
    """Returns the seconds of a slice at one speed, which is sent to each server in turn."""
    return num_servers * trace.requests[-1].at_s / speed


def best(rows: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    """Returns a server's highest goodput, and the highest request rate of which a share GOOD_SHARE was good."""
    mine = [row["servers"][label] for row in rows]
    kept = [
        one["sent"] / row["due_s"]
        for one, row in zip(mine, rows, strict=True)
        if one["goodput_share"] >= GOOD_SHARE and row["due_s"]  # one request has no rate
    ]
    return {"goodput_per_s": max(one["goodput_per_s"] for one in mine), "kept_per_s": max(kept, default=None)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up of started processes
    deadline = Deadline(60 * options.minutes - STOP_S)
    device = None if options.tiny else gpu()
    if device is None and not options.tiny:
        raise SystemExit("no GPU was found; use --tiny to run without one")
    try:
        fleet = Fleet(
            options.gpus, options.encoders, options.batched_tokens, options.peer_batched_tokens, options.ingresses,
            options.decode_workers, options.kv_gib, options.peer_processes, options.peer_threads, options.shared,
            options.max_num_seqs, options.parts, options.videos is not None, gpu=device is not None,
        )  # fmt: skip
    except ValueError as error:
        raise SystemExit(str(error)) from error
    report: dict[str, Any] = {
        "benchmark": "goodput",
        "tiny": options.tiny,
        "model": options.model,
        "gpu": device,
        "fleet": dataclasses.asdict(fleet),
        "proxy": "Serve's" if options.serve_proxy else "Serve's HAProxy",
        "cores": os.cpu_count(),
        "slos": [dataclasses.asdict(one) for one in options.slo],
        "rows": [],
        "again_ms": {},
        **provenance(options.commit, arguments),
    }
    logs = options.logs or (options.out.parent if options.out else Path.cwd())
    with tempfile.TemporaryDirectory(prefix="vt-") as kept:
        folder = Path(kept)
        checkpoint = folder / "qwen3_vl"
        if options.tiny:
            make_checkpoint("qwen3_vl", checkpoint, dtype="bfloat16")
        else:
            tower, text = goodput_plan.MODELS[options.model]
            make_published(tower, checkpoint, text=text)
            goodput_plan.published_config(checkpoint)
        print("the checkpoint is ready", flush=True)
        config = goodput_plan.serve_config(fleet, checkpoint, port=own_port(), cache_dir=folder / "state")
        sets = {} if options.alone else peers(fleet, checkpoint)
        everyone = [peer for one in sets.values() for peer in one]
        haproxy = not options.serve_proxy
        with (
            split_gpu(fleet.parts if fleet.gpu else 1, folder) as variables,
            Servers(config, everyone, gpu=fleet.gpu, logs=logs, haproxy=haproxy, variables=variables) as servers,
        ):
            ready = servers.wait(START_SHARE * deadline.left)
            if missing := [name for name in servers.urls if name not in ready]:
                for name in missing:
                    print(f"{name} did not start: {servers.last_words(name)}", flush=True)
                return 1
            report["ready_s"] = ready
            run(report, fleet, servers, sets, options, folder, deadline)
    write(report, options.out)
    return exit_code(report)


def exit_code(report: Mapping[str, Any]) -> int:
    """Returns 1 if nothing was measured, a request failed, or the client was late."""
    found = [one for row in report["rows"] for one in row["servers"].values()]
    measured = [*found, *report.get("videos", {}).values()]
    failed = sum(one["failed"] for one in [*measured, *report["again_ms"].values()])
    return 0 if measured and not failed and all(one["client"]["valid"] for one in found) else 1


def run(
    report: dict[str, Any],
    fleet: Fleet,
    servers: Servers,
    sets: Mapping[str, Sequence[Peer]],
    options: argparse.Namespace,
    folder: Path,
    deadline: Deadline,
) -> None:
    """Runs all measurements into `report`, which is saved after each."""
    pictures = folder / "pictures"
    with ExitStack() as stack:
        urls = {NAME: servers.urls[NAME]}
        for name, members in sets.items():
            port = stack.enter_context(start_balancer([one.port for one in members], folder))
            urls[name] = f"http://127.0.0.1:{port}"
        all_of = [Server(name, url) for name, url in urls.items()]
        pool = stack.enter_context(ClientPool(options.client_processes))
        for number in range(2 if options.load else 0):  # warms every replica up with concurrent requests
            warm = options.load[0][1][0].cut(8 * fleet.gpus)
            digest = hashlib.sha256(f"warm-up {number}".encode()).hexdigest()
            measure_slice(dataclasses.replace(warm, digest=digest), float("inf"), all_of, options, pictures, pool)
        if options.again:
            direct = {NAME: urls[NAME]} | {name: f"http://127.0.0.1:{one[0].port}" for name, one in sets.items()}
            report["again_ms"] = {name: measure_repeated(url, options.again) for name, url in direct.items()}
            print(f"the same request again: {report['again_ms']}", flush=True)
        for speeds, parts in options.load:
            for speed, trace in zip(speeds, parts, strict=True):
                if deadline.left < slice_duration_s(trace, speed, len(all_of)):
                    print(f"no time left for {trace.name} at {speed:g}", flush=True)
                    continue
                first = len(report["rows"]) % len(all_of)  # each server is first, second, … in turn
                row = measure_slice(trace, speed, all_of[first:] + all_of[:first], options, pictures, pool)
                report["rows"].append(row | {"due_s": row["trace"]["seconds"] / speed})
                if options.out is not None:
                    save(report, options.out)
    if options.videos is not None:
        report["videos"] = asyncio.run(videos.measure_load(urls, **options.videos))
        print(report["videos"], flush=True)
    names = dict.fromkeys(row["trace"]["name"] for row in report["rows"])
    report["best"] = {
        name: {
            one.label: best([row for row in report["rows"] if row["trace"]["name"] == name], one.label)
            for one in all_of
        }
        for name in names
    }
    print(f"best: {report['best']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
