"""From streamed answers to figures, laid out as vLLM's serving benchmark does. It must not know how they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.latency_client import Answer

WIDTH = 50
_GROUPS = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
)


def serving_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """Counts, rates, and mean, median and 99th percentile in milliseconds, over the requests that were answered.

    TTFT: to the first piece of text. TPOT: the rest of the answer over its tokens but one. ITL: each gap between
    pieces. A figure without a sample is None.
    """
    good = [answer for answer in answers if answer.ok]
    output = sum(answer.output_tokens for answer in good)
    prompt = sum(answer.prompt_tokens for answer in good)
    samples = {
        "ttft": [1e3 * answer.chunks_s[0] for answer in good],
        "tpot": [
            1e3 * (answer.chunks_s[-1] - answer.chunks_s[0]) / (answer.output_tokens - 1)
            for answer in good
            if answer.output_tokens > 1
        ],
        "itl": [1e3 * float(gap) for answer in good for gap in np.diff(answer.chunks_s)],
    }
    return {
        "successful": len(good),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error or f"status {answer.status}" for answer in answers if not answer.ok})[:5],
        "duration_s": duration_s,
        "input_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(good) / duration_s,
        "output_tokens_per_s": output / duration_s,
        "tokens_per_s": (prompt + output) / duration_s,
        **{f"{name}_ms": summary(values) for name, values in samples.items()},
    }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile (linear between samples); None for no values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }


def serving_text(figures: Mapping[str, Any]) -> str:
    """The figures, a line each."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    rows: list[tuple[str, float | int]] = [
        ("Successful requests:", figures["successful"]),
        ("Failed requests:", figures["failed"]),
        ("Benchmark duration (s):", figures["duration_s"]),
        ("Total input tokens:", figures["input_tokens"]),
        ("Total generated tokens:", figures["output_tokens"]),
        ("Request throughput (req/s):", figures["requests_per_s"]),
        ("Output token throughput (tok/s):", figures["output_tokens_per_s"]),
        ("Total Token throughput (tok/s):", figures["tokens_per_s"]),
    ]
    lines += [_line(name, value) for name, value in rows]
    for title, short, key in _GROUPS:
        lines.append(title.center(WIDTH, "-"))
        values = figures[f"{key}_ms"] or {}
        for name, stat in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{name} {short} (ms):", values.get(stat)))
    return "\n".join([*lines, "=" * WIDTH])


def _line(name: str, value: float | int | None) -> str:
    shown = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<40} {shown:<9}".rstrip()


def ladder_text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The ladder: each label with its average latency, and how many times as fast as the first it is."""
    lines: list[str] = []
    first: float | None = None
    for label, row in rows.items():
        if row.get("latency_ms") is None:
            continue
        mean = float(row["latency_ms"]["mean"])
        first = mean if first is None else first
        lines += [label, f"Avg latency with prefix cache: {mean:.2f} ms ({first / mean:.2f}×)", ""]
    return "\n".join(lines)
