"""Every request of a run, a line of JSON each: what it asked, how long it took, and what the server said of it.

Times are milliseconds. It must not know how anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.trace_client import Run
from benchmarks.trace_figures import tpot_ms
from benchmarks.trace_requests import Trace


def append(path: Path, trace: Trace, speed: float, runs: Mapping[str, Run]) -> None:
    """To a file that may be there. `runs`: by server, of a trace at a speed."""
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
