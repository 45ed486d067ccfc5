"""Plots a run on a trace; needs matplotlib (`pip install '.[bench]'`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.trace.client import Run
from benchmarks.trace.figures import Slo, tpot_ms

_SIZE_INCHES = (13.5, 4.0)


def is_possible() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(runs: Mapping[str, Run], slo: Slo, title: str, out: Path) -> None:
    """Writes a PNG: the share of requests below each TTFT and TPOT, and TTFT over the run, with a colour per server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, rest, over_time) = pyplot.subplots(1, 3, figsize=_SIZE_INCHES, layout="constrained")
    for name, run in runs.items():
        good = [one for one in run.sent if one.answer.ok]
        ttft = [1e3 * one.answer.chunks_s[0] for one in good]
        tpot = [value for one in good if (value := tpot_ms(one.answer)) is not None]
        # Shares are of all sent requests; a failed one is below no time.
        _shares(first, ttft, len(run.sent), name)
        _shares(rest, tpot, len(run.sent) - (len(good) - len(tpot)), name)
        over_time.plot([one.due_s for one in good], ttft, ".", markersize=3, label=name)
        bad = [one.due_s for one in run.sent if not one.answer.ok]
        over_time.plot(bad, [slo.ttft_ms] * len(bad), "x", color="black", label=f"{name}: failed" if bad else None)
    for axes, limit, label in ((first, slo.ttft_ms, "TTFT, ms"), (rest, slo.tpot_ms, "TPOT, ms")):
        axes.axvline(limit, color="grey", linestyle=":")
        axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02))
    over_time.axhline(slo.ttft_ms, color="grey", linestyle=":")
    over_time.set(xlabel="due, s of the trace", ylabel="TTFT, ms")
    for axes in (first, rest, over_time):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _shares(axes: object, values: Sequence[float], total: int, name: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / total, where="post", label=name)  # type: ignore[attr-defined]
