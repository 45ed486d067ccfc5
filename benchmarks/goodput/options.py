"""Command-line options of `bench_goodput.py`."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goodput.plan import MAX_NUM_SEQS, MODELS
from benchmarks.trace.figures import Slo
from benchmarks.trace.requests import Trace, alike_trace, read_trace
from planner.traces import TraceError


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Goodput against as many vLLM servers.")
    parser.add_argument(
        "--gpus", type=int, default=1, help="number of GPUs; encoder and language model share a single one (default 1)"
    )
    parser.add_argument(
        "--encoders", type=int, default=1, help="GPUs with encoders; others have language models (default 1)"
    )
    parser.add_argument("--shared", action="store_true", help="an encoder shares the GPU of each language model")
    parser.add_argument("--parts", type=int, default=1, help="number of parts of each GPU; --gpus then counts parts")
    parser.add_argument("--model", choices=sorted(MODELS), default="8b", help="size of Qwen3-VL (default 8b)")
    parser.add_argument("--load", type=load, action="append", default=[], metavar="TRACE:SPEED,SPEED:REQUESTS",
                        help="requests for each speed; may be given several times. TRACE is a file, or such as "
                        "4x640+400+150 for four images of 640², 400 tokens of text and an answer of 150, once a second "
                        "on average")  # fmt: skip
    parser.add_argument("--videos", type=videos, metavar="FRAMES:SIDE:CLIENTS:REQUESTS",
                        help="then requests with a new video each, one after the other by each client")  # fmt: skip
    parser.add_argument(
        "--pieces", type=int, default=2, help="number of pieces of a trace in which the servers take turns (default 2)"
    )
    parser.add_argument(
        "--batched-tokens", type=int, default=2048, help="token budget of our language models' steps (default 2048)"
    )
    parser.add_argument(
        "--peer-batched-tokens",
        type=numbers,
        default=(8192,),
        help="token budgets of vLLM's steps, such as 2048,8192 (default 8192)",
    )
    parser.add_argument(
        "--peer-processes", type=numbers, default=(1,), help="numbers of vLLM's API processes, such as 1,4 (default 1)"
    )
    parser.add_argument(
        "--peer-threads",
        type=numbers,
        default=(0,),
        help="torch's CPU threads in each of vLLM's processes, such as 0,1 (default 0: torch's own choice)",
    )
    parser.add_argument("--ingresses", type=int, default=4)
    parser.add_argument("--decode-workers", type=int, default=8, help="decoder processes per encoder (default 8)")
    parser.add_argument("--kv-gib", type=float, default=30.0, help="KV cache of each engine in GiB (default 30)")
    parser.add_argument(
        "--max-num-seqs",
        type=positive,
        default=MAX_NUM_SEQS,
        help="sequences in a step of each engine, and requests in flight of each of our language models (default 256)",
    )
    parser.add_argument(
        "--client-processes", type=positive, default=4, help="processes that send requests and read answers (default 4)"
    )
    parser.add_argument("--slo", type=slo, action="append", metavar="TTFT:TPOT",
                        help="milliseconds of a good answer; may be given several times (default 1000:50)")  # fmt: skip
    parser.add_argument("--again", type=int, default=60, help="repetitions of one request")
    parser.add_argument("--alone", action="store_true", help="do not measure vLLM's servers")
    parser.add_argument("--answers", type=Path, help="append a line of JSON per request to this file")
    parser.add_argument("--serve-proxy", action="store_true", help="use Serve's own proxy instead of its HAProxy")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--logs", type=Path, help="folder of the servers' logs; default: the folder of --out")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    options.slo = options.slo or [Slo()]
    if not options.load and options.videos is None:
        parser.error("--load or --videos is needed")
    return options


def load(text: str) -> tuple[tuple[float, ...], list[Trace]]:
    """Parses a trace with its speeds, as factors of its own pace, and a slice of it for each speed."""
    try:
        path, speeds, requests = text.rsplit(":", 2)
        wanted = tuple(float(speed) for speed in speeds.split(","))
        if alike := re.fullmatch(r"(\d+)x(\d+)\+(\d+)\+(\d+)", path):
            images, side, prompt_tokens, output_tokens = map(int, alike.groups())
            trace = alike_trace(images, side, prompt_tokens, output_tokens, len(wanted) * int(requests))
        else:
            trace = read_trace(Path(path))
        return wanted, slices(trace, len(wanted), int(requests))
    except (ValueError, OSError, TraceError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not TRACE:SPEED,SPEED:REQUESTS: {error}") from error


def videos(text: str) -> dict[str, int]:
    """Returns arguments of `videos.measure_load`."""
    return dict(zip(("frames", "side", "clients", "requests"), map(int, text.split(":")), strict=True))


def slo(text: str) -> Slo:
    ttft_ms, tpot_ms = text.split(":")
    return Slo(float(ttft_ms), float(tpot_ms))


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def slices(trace: Trace, number: int, requests: int) -> list[Trace]:
    """Returns `number` slices of a trace with disjoint requests and pictures. Raises ValueError if it is too short."""
    if number * requests > len(trace.requests):
        raise ValueError(
            f"{number} speeds of {requests} requests want {number * requests}; {trace.name} has {len(trace.requests)}"
        )
    made = []
    for first in range(0, number * requests, requests):
        rows = trace.requests[first : first + requests]
        moved = tuple(dataclasses.replace(one, at_s=one.at_s - rows[0].at_s) for one in rows)
        digest = hashlib.sha256(f"{trace.digest} {first}".encode()).hexdigest()
        made.append(Trace(trace.name, digest, moved))
    return made
