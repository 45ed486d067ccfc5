"""CPU time of each process per streamed token: `python benchmarks/serving/stream_cost.py http://127.0.0.1:8000`.

Clients stream long answers to short texts from a server of this machine. A process with one event loop passes on no
more tokens than it has time for. The last line on stdout is JSON. Needs httpx and psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import provenance, write
from benchmarks.serving.latency_client import TIMEOUT_S, ask, body, served_model

ROLES = (":LLM", ":Ingress", ":Encoder", "ProxyActor", "EngineCore", "ApiServer")
"""What Ray and vLLM put into the titles of their processes; others are named by their program."""
LEAST_US = 5.0
"""Processes below this are left out."""


def role(title: Sequence[str]) -> str:
    """Returns what a process is, by its command line."""
    text = " ".join(title)
    if found := next((one for one in ROLES if one in text), None):
        return found.strip(":")
    if "vllm" in text and "api_server" in text:
        return "ApiServer"
    program = Path(text.split(" ")[0]).name
    return program.split(".")[0] if program.startswith("ray::") else program  # without the method that it runs


def cpu_seconds() -> dict[str, float]:
    """Returns the CPU time since their start of all processes of this machine, by role."""
    found: defaultdict[str, float] = defaultdict(float)
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
            found[role(process.cmdline())] += times.user + times.system
        except psutil.Error:
            continue
    found.pop("", None)  # the kernel's
    return dict(found)


async def stream(url: str, model: str, clients: int, tokens: int, seed: int) -> int:
    """Streams an answer for each of `clients` at once and returns the number of tokens. Raises RuntimeError if one
    fails."""
    async with httpx.AsyncClient(
        timeout=TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:
        asked = [
            body(model, [], words=8, output_tokens=tokens, picture_seed=0, text_seed=seed * clients + number)
            for number in range(clients)
        ]
        answers = await asyncio.gather(*(ask(client, url, json.dumps(one).encode()) for one in asked))
    if failed := [answer.error or answer.status for answer in answers if not answer.ok]:
        raise RuntimeError(f"{len(failed)} of {clients} answers failed: {failed[0]}")
    return sum(answer.output_tokens for answer in answers)


async def measure(url: str, *, clients: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Returns tokens per second and CPU microseconds per token by role for each round; one before them is not
    counted."""
    model = await served_model(url)
    found = []
    for number in range(rounds + 1):
        before, began = cpu_seconds(), time.perf_counter()
        streamed = await stream(url, model, clients, tokens, number)
        took_s = time.perf_counter() - began
        by_role = {
            name: round(1e6 * (seconds - before.get(name, 0.0)) / streamed, 1)
            for name, seconds in cpu_seconds().items()
        }
        found.append(
            {
                "tokens_per_s": round(streamed / took_s, 1),
                "us_per_token": {name: us for name, us in sorted(by_role.items()) if us >= LEAST_US},
            }
        )
    return found[1:]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU time of each process per streamed token.")
    parser.add_argument("url", help="of a server on this machine that does nothing else")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer (default 400)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args(arguments)
    rounds = asyncio.run(measure(options.url, clients=options.clients, tokens=options.tokens, rounds=options.rounds))
    write({"benchmark": "stream_cost", "rounds": rounds, **provenance(None, arguments)}, options.out)


if __name__ == "__main__":
    main()
