"""CPU time of each process per streamed token: `python benchmarks/serving/stream_cost.py http://127.0.0.1:8000`.

Clients stream long answers to short texts from a server of this machine. A process with one event loop passes on no
more tokens than it has time for. The last line on stdout is JSON. Needs httpx and psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import provenance, write
from benchmarks.serving.busy import cpu_seconds, shares
from benchmarks.serving.latency_client import body, open_loop, served_model

KINDS = {
    "language model": ":LLM",
    "ingress": ":Ingress",
    "encoder": ":Encoder",
    "Serve's proxy": "ProxyActor",
    "engine": "EngineCore",
    "API servers": "VLLM::ApiServer",
    "API server": "openai.api_server",
    "client": "stream_cost.py",
    "HAProxy": "haproxy",
}
"""Parts of the command lines of the processes on a token's way."""


async def stream(url: str, model: str, clients: int, tokens: int, seed: int) -> tuple[int, float]:
    """Streams an answer for each of `clients` at once and returns the number of tokens and the seconds. Raises
    RuntimeError if one fails."""
    asked = [
        body(model, [], words=8, output_tokens=tokens, picture_seed=0, text_seed=seed * clients + number)
        for number in range(clients)
    ]
    answers, took_s = await open_loop(url, asked, float("inf"), seed)
    if failed := [answer.error or answer.status for answer in answers if not answer.ok]:
        raise RuntimeError(f"{len(failed)} of {clients} answers failed: {failed[0]}")
    return sum(answer.output_tokens for answer in answers), took_s


async def measure(url: str, *, clients: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Returns tokens per second and CPU microseconds per token by kind of process for each round; one before them is
    not counted."""
    model = await served_model(url)
    found = []
    for number in range(rounds + 1):
        before = cpu_seconds(KINDS)
        streamed, took_s = await stream(url, model, clients, tokens, number)
        cores = {kind: share["cores"] for kind, share in shares(before, cpu_seconds(KINDS), took_s).items()}
        found.append(
            {
                "tokens_per_s": round(streamed / took_s, 1),
                "us_per_token": {kind: round(1e6 * each * took_s / streamed, 1) for kind, each in cores.items()},
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
