"""Computes figures of a run: latencies, goodput, errors, and whether the client kept up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serving.latency_client import Answer
from benchmarks.serving.latency_figures import WIDTH, serving_figures, serving_text
from benchmarks.trace.client import TICK_S, Run, Sent

_COMPARED = (
    ("goodput_per_s", "Goodput (req/s)"),
    ("requests_per_s", "Requests (req/s)"),
    ("output_tokens_per_s", "Output tokens (tok/s)"),
    *(
        (f"{name}_ms.{stat}", f"{stat} {name.upper()} (ms)")
        for name in ("ttft", "tpot", "itl")
        for stat in ("mean", "median", "p99")
    ),
)


@dataclass(frozen=True)
class Slo:
    """Latency bounds of a good answer, in milliseconds."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0

    def met(self, answer: Answer) -> bool:
        """Whether the answer is good; an answer of one token has no TPOT."""
        if not answer.ok:
            return False
        tpot = tpot_ms(answer)
        return 1e3 * answer.chunks_s[0] <= self.ttft_ms and (tpot is None or tpot <= self.tpot_ms)


def tpot_ms(answer: Answer) -> float | None:
    """Returns milliseconds per token after the first; None for an answer of one token or a failed one."""
    if not answer.ok or answer.output_tokens < 2:
        return None
    return 1e3 * (answer.chunks_s[-1] - answer.chunks_s[0]) / (answer.output_tokens - 1)


def figures(run: Run, slo: Slo, *, max_lag_ms: float) -> dict[str, Any]:
    """Returns all figures of one server. TTFT counts from when a request was due."""
    answers = [one.answer for one in run.sent]
    good = sum(map(slo.met, answers))
    found = serving_figures(answers, run.duration_s)
    refused = [one for one in run.sent if one.answer.status in (429, 503)]
    return {
        **found,
        "sent": len(answers),
        "goodput_per_s": good / run.duration_s,
        "goodput_share": good / len(answers),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
        "errors_by_status": dict(sorted(Counter(map(kind_of_error, failed(run.sent))).items())),
        "refused": len(refused),
        "refused_with_retry_after": sum(one.retry_after for one in refused),
        "client": client_lag(run, max_lag_ms),
    }


def goodput_shares(run: Run, slos: Sequence[Slo]) -> dict[str, float]:
    """Returns the share of requests that meet each SLO, by its milliseconds as `TTFT:TPOT`."""
    return {
        f"{slo.ttft_ms:g}:{slo.tpot_ms:g}": sum(slo.met(one.answer) for one in run.sent) / len(run.sent) for slo in slos
    }


def failed(sent: Sequence[Sent]) -> list[Sent]:
    return [one for one in sent if not one.answer.ok]


def kind_of_error(sent: Sent) -> str:
    """Returns the status, or "timeout", "connection", or that a response of status 200 was broken off."""
    answer = sent.answer
    if answer.error == "timeout":
        return "timeout"
    if answer.status == 0:
        return "connection"
    return "200, broken off" if answer.status == 200 else str(answer.status)


def client_lag(run: Run, max_lag_ms: float) -> dict[str, Any]:
    """Returns the client's lag. `valid`: at most `max_lag_ms` for 99 % of the requests and for 99 % of the time."""
    sending = [1e3 * one.lag_s for one in run.sent]
    # A lag is weighted by its duration: a long stall is a single tick, but affects all requests in that time.
    loop = np.sort(np.array(run.loop_lags_s))
    until_s = np.cumsum(loop + TICK_S)
    found: dict[str, dict[str, float] | None] = {
        "send_lag_ms": {"p99": float(np.percentile(sending, 99)), "max": max(sending)},
        "loop_lag_ms": None,
    }
    if loop.size:
        at = int(np.searchsorted(until_s, 0.99 * until_s[-1]))
        found["loop_lag_ms"] = {"p99": 1e3 * float(loop[at]), "max": 1e3 * float(loop[-1])}
    valid = all(values is None or values["p99"] <= max_lag_ms for values in found.values())
    return {**found, "max_lag_ms": max_lag_ms, "valid": valid}


def text(figures: Mapping[str, Any]) -> str:
    """Returns a serving benchmark's block of figures, followed by goodput, errors and the client's lag."""
    slo, client = figures["slo"], figures["client"]
    lines = [serving_text(figures).rpartition("\n")[0]]
    lines.append("Goodput".center(WIDTH, "-"))
    lines.append(
        _row(f"TTFT <= {slo['ttft_ms']:g} ms, TPOT <= {slo['tpot_ms']:g} ms:", f"{figures['goodput_share']:.1%}")
    )
    lines.append(_row("Request goodput (req/s):", f"{figures['goodput_per_s']:.2f}"))
    if figures["errors_by_status"]:
        lines.append("Errors".center(WIDTH, "-"))
        lines += [_row(f"{name}:", str(number)) for name, number in figures["errors_by_status"].items()]
        if figures["refused"]:
            lines.append(
                _row("429 and 503 with Retry-After:", f"{figures['refused_with_retry_after']}/{figures['refused']}")
            )
    lines.append("The client itself".center(WIDTH, "-"))
    for name, title in (("send_lag_ms", "sending"), ("loop_lag_ms", "reading")):
        if client[name] is not None:
            lines.append(_row(f"P99 lag in {title} (ms):", f"{client[name]['p99']:.2f}"))
    verdict = "yes" if client["valid"] else f"NO, over {client['max_lag_ms']:g} ms"
    return "\n".join([*lines, _row("Valid:", verdict), "=" * WIDTH])


def _row(name: str, value: str) -> str:
    return f"{name:<40} {value:<9}".rstrip()


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns each figure of both servers, and the ratio of the second to the first."""
    rows: dict[str, dict[str, float | None]] = {}
    for key, _ in _COMPARED:
        values = [_value(one, key) for one in (first, second)]
        a, b = values
        rows[key] = {"first": a, "second": b, "ratio": b / a if a and b is not None else None}
    return rows


def _value(figures: Mapping[str, Any], key: str) -> float | None:
    name, _, stat = key.partition(".")
    value = figures[name]
    if stat:
        value = None if value is None else value[stat]
    return None if value is None else float(value)


def compared_text(rows: Mapping[str, Mapping[str, float | None]], names: Sequence[str]) -> str:
    """Returns a line per figure: the first, the second, and the ratio of the second to the first."""
    width = max(12, *(len(name) + 2 for name in names))
    lines = [f"{'':<24}{names[0]:>{width}}{names[1]:>{width}}{'ratio':>9}"]
    for key, title in _COMPARED:
        row = rows[key]
        shown = ["-" if row[name] is None else f"{row[name]:.2f}" for name in ("first", "second")]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"{title:<24}{shown[0]:>{width}}{shown[1]:>{width}}{ratio:>9}")
    return "\n".join(lines)
