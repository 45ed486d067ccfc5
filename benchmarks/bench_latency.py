"""Latency of a running application: `python benchmarks/bench_latency.py --url http://127.0.0.1:8000 --label eager`.

Makes two measurements. The ladder: single requests with the same text, which is in the language model's prefix cache,
and with new pictures, which the encoder encodes. The serving figures: an open loop of streamed requests. Start the
application with one set of switches, run this with a label for it, and repeat with the next; `--out` collects the
labels in one file. The last line on stdout is JSON. Needs httpx, numpy and pillow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import provenance, write
from benchmarks.serving.latency_client import Answer, body, one_by_one, open_loop, served_model
from benchmarks.serving.latency_figures import figures, ladder_text, serving_text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Latency of a running application.")
    parser.add_argument("--url", required=True, help="URL of the application, without /v1")
    parser.add_argument("--label", required=True, help="name of the application's configuration in the results")
    parser.add_argument("--model", help="default: the first served model")
    parser.add_argument(
        "--images", type=_sizes, default=[(448, 448)] * 4, help="sizes of a request's images, such as 448x448,224x224"
    )
    parser.add_argument("--words", type=int, default=100, help="words of each prompt's text")
    parser.add_argument(
        "--latency-requests", type=int, default=10, help="requests sent one at a time; 0 skips the ladder"
    )
    parser.add_argument("--latency-tokens", type=int, default=32, help="tokens of each of their answers")
    parser.add_argument("--prompts", type=int, default=10, help="requests of the open loop; 0 skips it")
    parser.add_argument("--rate", type=float, default=float("inf"), help="requests per second; default: all at once")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens of each answer of the open loop")
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", help="name of the application's GPU, stored in the result")
    parser.add_argument("--out", type=Path, help="file that collects the rows of several labels")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    options.url = options.url.rstrip("/")
    if options.rate <= 0:
        parser.error(f"--rate is {options.rate}; it must be positive")
    return options


def _sizes(text: str) -> list[tuple[int, int]]:
    try:
        return [(int(w), int(h)) for w, h in (size.split("x") for size in text.split(",") if size)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 448x448,224x224") from None


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns one label's row. Raises httpx.HTTPError if the application cannot be reached."""
    model = options.model or await served_model(options.url)

    def request(number: int, tokens: int, text: int) -> dict[str, Any]:
        # Pictures are unique to each request of a run, including warm-ups.
        seed = 100_000 * options.seed + number
        return body(
            model,
            options.images,
            words=options.words,
            output_tokens=tokens,
            picture_seed=seed,
            text_seed=options.seed + text,
        )

    numbers = iter(range(10**6))
    warm = await one_by_one(
        options.url, [request(next(numbers), options.latency_tokens, 0) for _ in range(max(1, options.warm_ups))]
    )
    print_failures(warm)
    latency: list[Answer] = []
    if options.latency_requests:
        bodies = [request(next(numbers), options.latency_tokens, 0) for _ in range(options.latency_requests)]
        latency = await one_by_one(options.url, bodies)
        print_failures(latency)
    serving: tuple[list[Answer], float] | None = None
    if options.prompts:
        bodies = [request(next(numbers), options.output_tokens, 1 + n) for n in range(options.prompts)]
        serving = await open_loop(options.url, bodies, options.rate, options.seed)
        print_failures(serving[0])
    return {"model": model, **figures(latency, serving)}


def print_failures(answers: Sequence[Answer]) -> None:
    """Prints the requests that failed."""
    for answer in answers:
        if not answer.ok:
            print(f"failed: status {answer.status} {answer.error}", file=sys.stderr, flush=True)


def read_rows(out: Path | None) -> dict[str, Any]:
    """Returns the rows of an earlier output file, by label."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text())
    if found.get("benchmark") != "latency":
        raise ValueError(f"{out} is not a result of this program")
    rows: dict[str, Any] = found["rows"]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rows = read_rows(options.out)
    row = asyncio.run(measure(options))
    row |= {
        "gpu": options.gpu,
        "images": [list(size) for size in options.images],
        "words": options.words,
        "latency_tokens": options.latency_tokens,
        "rate": None if options.rate == float("inf") else options.rate,
        **provenance(options.commit, arguments),
    }
    rows.pop(options.label, None)
    rows[options.label] = row
    if row["serving"] is not None:
        print(f"RESULTS {options.prompts} prompts, {options.label}:\n{serving_text(row['serving'])}\n")
    print(ladder_text(rows), flush=True)
    write({"benchmark": "latency", "rows": rows}, options.out)
    failed = row.get("latency_failed", 0) + (row["serving"] or {}).get("failed", 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
