"""Computes figures from streamed answers, formatted like vLLM's serving benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.ladder.text import columns
from benchmarks.serving.latency_client import Answer

WIDTH = 50
_DURATION = re.compile(r"([\w-]+);dur=([\d.]+)")
_GROUPS = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
)


def figures(
    latency: Sequence[Answer], serving: tuple[Sequence[Answer], float] | None, again: Sequence[Answer] = ()
) -> dict[str, Any]:
    """Returns a label's figures: of single requests, an open loop with its total seconds, and one repeated request."""
    row: dict[str, Any] = {"latency_ms": None, "serving": None}
    if latency:
        good = [answer for answer in latency if answer.ok]
        row["latency_ms"] = summary([1e3 * answer.total_s for answer in good])
        row["latency_ttft_ms"] = summary([1e3 * answer.chunks_s[0] for answer in good])
        row["latency_requests"] = len(good)
        row["latency_failed"] = len(latency) - len(good)
        row["stages_ms"] = stages([answer.server_timing for answer in good])
    if again:
        good = [answer for answer in again if answer.ok]
        row["again_ms"] = summary([1e3 * answer.total_s for answer in good])
        row["again_requests"] = len(good)
        row["again_failed"] = len(again) - len(good)
        row["again_stages_ms"] = stages([answer.server_timing for answer in good])
    if serving is not None:
        row["serving"] = serving_figures(*serving)
    return row


def overheads(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns each label's median for the repeated request, and its difference from vLLM alone."""
    medians = {
        label: (float(row["again_ms"]["median"]), row.get("rung")) for label, row in rows.items() if row.get("again_ms")
    }
    alone = [median for median, rung in medians.values() if rung is None]
    lines = []
    for label, (median, rung) in medians.items():
        over = f", {median - min(alone):+.2f} ms over vLLM alone" if alone and rung is not None else ""
        lines.append(f"{label}: the same request again, one token: {median:.2f} ms (median){over}")
    return "\n".join(lines)


def stages(headers: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each duration in Server-Timing headers in milliseconds; empty without headers."""
    found: dict[str, list[float]] = {}
    for header in headers:
        for name, duration in _DURATION.findall(header):
            found.setdefault(name, []).append(float(duration))
    return {name: float(np.mean(values)) for name, values in found.items()}


def serving_figures(answers: Sequence[Answer], duration_s: float) -> dict[str, Any]:
    """Returns counts, rates, and mean, median and 99th percentile in milliseconds, over the answered requests.

    TTFT: to the first piece of text. TPOT: the rest of the answer over its tokens minus one. ITL: each gap between
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
    """Returns mean, median and 99th percentile (linear between samples); None without values."""
    if not values:
        return None
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
    }


def serving_text(figures: Mapping[str, Any]) -> str:
    """Returns the figures, one per line."""
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
    """Returns the ladder: each label with its mean latency, and its speed relative to the first."""
    lines: list[str] = []
    first: float | None = None
    for label, row in rows.items():
        if row.get("latency_ms") is None:
            continue
        mean = float(row["latency_ms"]["mean"])
        first = mean if first is None else first
        lines += [label, f"Avg latency with prefix cache: {mean:.2f} ms ({first / mean:.2f}×)", ""]
    return "\n".join(lines)


def latency_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a line per label: the ladder's mean with its ratio to the first, stages, and means of serving figures."""
    header = ["mean ms", "latency", "(×)", "to first text", "encode", "preprocess", "transfer", "TTFT", "TPOT", "tok/s"]
    header += ["ready s", "first answer s"]
    lines: list[list[str]] = []
    first: float | None = None
    for label, row in rows.items():
        mean = (row.get("latency_ms") or {}).get("mean")
        first = first or mean
        serving, took = row.get("serving") or {}, row.get("stages_ms") or {}
        values = [
            mean,
            first / mean if first and mean else None,
            (row.get("latency_ttft_ms") or {}).get("mean"),
            *(took.get(name) for name in ("encode", "preprocess", "transfer")),
            *((serving.get(f"{name}_ms") or {}).get("mean") for name in ("ttft", "tpot")),
            serving.get("output_tokens_per_s"),
            row.get("ready_s"),
            row.get("first_answer_s"),
        ]
        lines.append([label, *("-" if value is None else f"{value:.2f}" for value in values)])
    return "\n".join(columns(header, lines))
