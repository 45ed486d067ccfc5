"""Writes every request of a run as a line of JSON: the request, its times, and the server's response.

Times are in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.trace.client import Run
from benchmarks.trace.figures import tpot_ms
from benchmarks.trace.requests import Trace


def append(path: Path, trace: Trace, speed: float, runs: Mapping[str, Run]) -> None:
    """Appends to a file, which may exist. `runs`: by server, of a trace at one speed."""
    with path.open("a") as file:
        file.writelines(lines(trace, speed, runs))


def lines(trace: Trace, speed: float, runs: Mapping[str, Run]) -> Iterator[str]:
    for label, run in runs.items():
        for one in run.sent:
            answer, asked = one.answer, trace.requests[one.index]
            told = {
                "server": label,
                "trace": trace.name,
                "speed": speed,
                "due_s": round(asked.at_s / speed, 3),
                "images": [[image.width, image.height] for image in asked.images],
                "prompt_tokens": answer.prompt_tokens,
                "output_tokens": answer.output_tokens,
                "ttft_ms": round(1e3 * answer.chunks_s[0], 1) if answer.chunks_s else None,
                "tpot_ms": tpot_ms(answer),
                "total_ms": round(1e3 * answer.total_s, 1),
                "server_timing": answer.server_timing,
                "error": answer.error,
            }
            yield json.dumps(told) + "\n"
