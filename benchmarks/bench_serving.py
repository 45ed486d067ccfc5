"""The ladder end to end: each rung behind the running application, and vLLM alone, on one GPU.

`python benchmarks/bench_serving.py --out serving.json`. All servers run at once and take turns, in a different order
each round, with the same requests: single requests with the same text, which is in the prefix cache, and new pictures;
an open loop of streamed requests; and one request with a small picture, repeated for one token with warm caches, which
measures the overhead of the server. A server that does not start is skipped with the reason. The last line on stdout is
JSON, and `--out` is written after every round. Needs Ray and vLLM; `--tiny` runs without a GPU, on a small checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_latency import print_failures
from benchmarks.ladder.measure import Deadline
from benchmarks.ladder.rungs import RUNGS
from benchmarks.record import gpu, provenance, save, write
from benchmarks.serving.checkpoint import GENERIC, make_generic, make_published
from benchmarks.serving.latency_client import Answer, body, one_by_one, open_loop
from benchmarks.serving.latency_figures import figures, ladder_text, latency_table, overheads
from benchmarks.serving.plan import (
    DECODE_WORKERS,
    ENCODER_SHARE,
    LLM_SHARE,
    MODEL,
    Served,
    engine_args,
    list_servers,
    serve_config,
    vllm_command,
    vllm_environment,
)
from benchmarks.serving.servers import Peer, Servers, own_port, peer_port
from training.checkpoints import make_checkpoint

START_SHARE = 0.5
"""Maximum share of the time for starting; servers not ready by then are skipped."""
STOP_S = 30.0
"""Seconds reserved for stopping the servers."""
FIRST_S = 150.0
"""Seconds for the first answers of a server, which include the start of an encoder."""
WARM_UPS = 2
GENERIC_RUNGS = ("eager", "cudagraph")
"""Those that a model without a tower of ours has."""
AGAIN_FIRST = 3
Bodies = tuple[list[dict[str, Any]], list[dict[str, Any]]]
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """The requests of one round."""

    images: tuple[tuple[int, int], ...]
    words: int
    latency_requests: int
    latency_tokens: int
    prompts: int
    output_tokens: int
    rate: float
    again: int = 0
    """Repetitions of one request, sent one at a time."""
    again_side: int = 224
    """Side of that request's picture in pixels."""


@dataclass
class Options:
    """Answers of one server so far."""

    latency: list[Answer] = field(default_factory=list)
    serving: list[Answer] = field(default_factory=list)
    serving_s: float = 0.0
    again: list[Answer] = field(default_factory=list)
    first_answer_s: float | None = None
    """Seconds of the first request with pictures, which starts an encoder of the application."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The ladder end to end, beside vLLM alone.")
    parser.add_argument("--model", choices=("qwen3_vl", *GENERIC), default="qwen3_vl")
    parser.add_argument(
        "--rungs", type=_rungs, help=f"some of {','.join(RUNGS)}; default: all, without a tower of ours eager,cudagraph"
    )
    parser.add_argument("--no-peers", action="store_true", help="do not measure vLLM alone")
    parser.add_argument("--names", help="some of the servers, such as fusion,fusion-asking,vllm-graphs")
    parser.add_argument("--tiny", action="store_true", help="a small checkpoint, on the CPU")
    parser.add_argument("--haproxy", action="store_true", help="use Serve's HAProxy instead of its own proxy")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=4, help="images per request")
    parser.add_argument("--side", type=int, default=448, help="side of an image in pixels")
    parser.add_argument("--words", type=int, default=100, help="words of each prompt's text")
    parser.add_argument("--latency-requests", type=int, default=10, help="requests sent one at a time, per round")
    parser.add_argument("--latency-tokens", type=int, default=16, help="tokens of each of their answers")
    parser.add_argument("--prompts", type=int, default=10, help="requests of the open loop, per round")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second; default: all at once")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens of each answer of the open loop")
    parser.add_argument("--again", type=int, default=40, help="repetitions of one request, per round")
    parser.add_argument("--again-side", type=int, default=224, help="side of its picture in pixels")
    parser.add_argument("--logs", type=Path, help="folder of the servers' logs; default: the folder of --out")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    asked = parser.parse_args(arguments)
    if asked.rungs is None:
        asked.rungs = GENERIC_RUNGS if asked.model in GENERIC else RUNGS
    for name in ("rounds", "images", "side", "latency_requests", "prompts"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(asked, name)}; it must be at least 1")
    return asked


def _rungs(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in RUNGS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(RUNGS)}")
    return names


def requests(load: Load, number: int) -> Bodies:
    """Returns a round's single requests, whose text all rounds share, and those of the open loop, whose text is new.

    Rounds count from 0; -1 is the warm-up. All pictures are unique.
    """
    per_round = load.latency_requests + load.prompts
    first = (number + 1) * per_round

    def one(place: int, tokens: int, text: int) -> dict[str, Any]:
        return body(
            MODEL, load.images, words=load.words, output_tokens=tokens, picture_seed=first + place, text_seed=text
        )

    latency = [one(place, load.latency_tokens, 0) for place in range(load.latency_requests)]
    opened = [
        one(load.latency_requests + place, load.output_tokens, 1 + first + place) for place in range(load.prompts)
    ]
    return latency, opened


async def warm(url: str, asked: Options, load: Load) -> bool:
    """Sends the first requests to a server; returns whether it answers."""
    bodies, _ = requests(load, -1)
    began = time.perf_counter()
    answers = await one_by_one(url, bodies[:1])
    asked.first_answer_s = time.perf_counter() - began
    answers += await one_by_one(url, bodies[1 : 1 + WARM_UPS])
    print_failures(answers)
    return all(answer.ok for answer in answers)


async def measure(url: str, asked: Options, load: Load, number: int, bodies: Bodies) -> None:
    """Runs one round on one server."""
    latency, opened = bodies
    answers = await one_by_one(url, latency)
    opened_answers, seconds = await open_loop(url, opened, load.rate, number)
    if load.again:
        side = load.again_side
        same = body(MODEL, [(side, side)], words=10, output_tokens=1, picture_seed=10**6, text_seed=-1)
        # The first few fill this server's caches.
        asked.again += (await one_by_one(url, [same] * (AGAIN_FIRST + load.again)))[AGAIN_FIRST:]
    print_failures([*answers, *opened_answers, *asked.again])
    asked.latency += answers
    asked.serving += opened_answers
    asked.serving_s += seconds


def run_with_timeout(work: Coroutine[Any, Any, T], seconds: float) -> T | None:
    """Returns the result of `work`; None if it takes longer than `seconds`."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, max(1.0, seconds))

    try:
        return asyncio.run(bounded())
    except TimeoutError:
        return None


def rotate_names(names: list[str], number: int) -> list[str]:
    """Rotates the names, so that each round begins with another one."""
    shift = number % len(names) if names else 0
    return names[shift:] + names[:shift]


def rows(
    served: Sequence[Served], found: Mapping[str, Options], ready: Mapping[str, float], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a row per measured server, by label, in the order of `served`."""
    made = {}
    for one in served:
        asked = found.get(one.name)
        if asked is not None and asked.latency:
            made[one.label] = {
                "model": MODEL,
                "rung": one.rung,
                "llm_graphs": one.llm_graphs,
                **figures(asked.latency, (asked.serving, asked.serving_s), asked.again),
                "ready_s": ready.get(one.name),
                "first_answer_s": asked.first_answer_s,
                **common,
            }
    return made


def start_servers(
    served: Sequence[Served], checkpoint: Path, scratch: Path, *, gpu: bool, logs: Path, haproxy: bool
) -> Servers:
    """Starts all servers in parallel. `scratch`: a folder for caches of the encoders."""
    ours = [one for one in served if one.rung is not None]
    config = serve_config(ours, checkpoint, gpu=gpu, port=own_port(), cache_dir=scratch) if ours else None
    peers = [
        Peer(one.name, vllm_command(one, checkpoint, gpu=gpu, port=port), port, vllm_environment(one))
        for one, port in ((one, peer_port(n)) for n, one in enumerate(one for one in served if one.rung is None))
    ]
    return Servers(config, peers, gpu=gpu, logs=logs, haproxy=haproxy)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up of started processes
    deadline = Deadline(60 * options.minutes - STOP_S)
    device = None if options.tiny else gpu()
    if device is None and not options.tiny:
        raise SystemExit("no GPU was found; use --tiny to run without one")
    load = Load(
        ((options.side, options.side),) * options.images, options.words, options.latency_requests,
        options.latency_tokens, options.prompts, options.output_tokens, options.rate, options.again, options.again_side,
    )  # fmt: skip
    served, skipped = list_servers(
        options.rungs, gpu=device is not None, peers=not options.no_peers, generic=options.model in GENERIC
    )
    if options.names:
        names = options.names.split(",")
        if unknown := sorted(set(names) - {one.name for one in served}):
            raise SystemExit(f"--names has {unknown[0]!r}; there are {', '.join(one.name for one in served)}")
        served = [one for one in served if one.name in names]
    common = {
        "gpu": device and device["name"],
        "images": [list(size) for size in load.images],
        "words": load.words,
        "latency_tokens": load.latency_tokens,
        "output_tokens": load.output_tokens,
        "again_side": load.again_side,
        "rate": None if load.rate == float("inf") else load.rate,
        **provenance(options.commit, arguments),
    }
    report: dict[str, Any] = {
        "benchmark": "latency",
        "model": options.model,
        "tiny": options.tiny,
        "gpu": device,
        "side_by_side": [one.label for one in served],
        "proxy": "Serve's HAProxy" if options.haproxy else "Serve's",
        "ray_variables": {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")},
        "shares": {"encoder": ENCODER_SHARE, "llm": LLM_SHARE, "decode_workers": DECODE_WORKERS},
        "engine_args": engine_args(served[0], gpu=device is not None) if served else {},
        "skipped": skipped,
        "rows": {},
    }
    found = {one.name: Options() for one in served}
    ready: dict[str, float] = {}
    logs = options.logs or (options.out.parent if options.out else Path.cwd())

    def keep() -> None:
        report["rows"] = rows(served, found, ready, common)
        if options.out is not None:
            save(report, options.out)

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / options.model
        if options.model in GENERIC:
            make_generic(options.model, checkpoint, tiny=options.tiny)
        elif options.tiny:
            make_checkpoint("qwen3_vl", checkpoint, dtype="bfloat16")
        else:
            make_published("qwen3_vl", checkpoint)
        print(f"the checkpoint is ready; starting {', '.join(found)}", flush=True)
        state, on_gpu = Path(folder) / "state", device is not None
        with start_servers(served, checkpoint, state, gpu=on_gpu, logs=logs, haproxy=options.haproxy) as servers:
            ready = servers.wait(START_SHARE * deadline.left)
            urls: dict[str, str] = {}
            # vLLM alone answers immediately; an encoder of the application starts with its first picture.
            for one in sorted(served, key=lambda one: one.rung is not None):
                reason = None
                if one.name not in ready:
                    reason = f"did not come up: {servers.last_words(one.name)}"
                elif deadline.over:
                    reason = "no time was left"
                elif not run_with_timeout(
                    warm(servers.urls[one.name], found[one.name], load), min(FIRST_S, deadline.left)
                ):
                    reason = f"does not answer: {servers.last_words(one.name)}"
                if reason is None:
                    urls[one.name] = servers.urls[one.name]
                    print(f"{one.name}: first answer after {found[one.name].first_answer_s:.1f} s", flush=True)
                else:
                    skipped.append({"name": one.name, "reason": reason})
                    print(f"skipped: {one.name}: {reason}", flush=True)
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", flush=True)
                bodies = requests(load, number)
                for name in rotate_names(list(urls), number):
                    if not deadline.over:
                        run_with_timeout(
                            measure(urls[name], found[name], load, number, bodies), deadline.left + STOP_S / 2
                        )
                keep()
    keep()
    print(f"\n{ladder_text(report['rows'])}\n{latency_table(report['rows'])}", flush=True)
    print(overheads(report["rows"]), flush=True)
    for entry in skipped:
        print(f"skipped: {entry['name']}: {entry['reason']}", flush=True)
    write(report, options.out)
    failed = sum(
        row["latency_failed"] + row["serving"]["failed"] + row.get("again_failed", 0) for row in report["rows"].values()
    )
    return 1 if failed or len(report["rows"]) < len(served) else 0


if __name__ == "__main__":
    sys.exit(main())
