"""Budgets fitted to a trace: `python benchmarks/fit_budgets.py trace.jsonl`; with `--evaluate`, how much they pad.

The evaluation fits on the trace's first half and counts on its second, in windows of images in order of arrival, with
times from a recorded cost table: the fitted budgets under `encoder.planning.plan`, the greedy rule (`encoder.packing`)
with the budgets it came with, and eager runs, which may hold as many tokens at once as the largest budget, or as the
greedy rule's. Choosing, an eager run counts `--prefer-replays` more than it takes: its launches need the host, which
has requests to serve. The totals count what things take. The last line on stdout is JSON. Needs no GPU and no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import ROOT, provenance, write
from encoder.budget_trial import Bounds, outcome
from encoder.packing import pack
from encoder.planning import ImageCost, plan
from encoder.recorded_costs import AnyCosts, read_costs
from encoder.traces import RULES, halves, windows
from encoder.traces import read_costs as read_trace

DEFAULT_COSTS = ROOT / "benchmarks" / "results" / "costs_h200.json"
GREEDY_BUDGETS = (2048, 4096, 8192, 13824)
"""The budgets of the rule's first description, the pull request that `encoder.packing` names."""


def evaluate(trace: Sequence[ImageCost], costs: AnyCosts, bounds: Bounds) -> dict[str, object]:
    """Fits on the first half, counts on the second. Raises ValueError for a trace of less than two windows."""
    window = bounds.window
    first, second = (windows(list(half), window) for half in halves(list(trace), window))
    if not second:
        raise ValueError(f"{len(trace)} images are too few for two windows of {window}")
    budgets = bounds.fit(costs, first)
    fitted = bounds.tried(costs, budgets, second)
    eager = partial(plan, table=costs.table(()), max_images=window)
    alone, wide = (
        outcome(costs, (), [(images, eager(images, max_tokens=tokens)) for images in second])
        for tokens in (bounds.largest, GREEDY_BUDGETS[-1])
    )
    greedy = partial(pack, budgets=GREEDY_BUDGETS, max_images=window)
    ruled = outcome(
        costs, GREEDY_BUDGETS, [(images, greedy([image.num_tokens for image in images])) for images in second]
    )
    return {
        "images_fitted": sum(map(len, first)),
        "images_counted": sum(map(len, second)),
        "budgets": list(budgets),
        "fitted": asdict(fitted),
        "eager": asdict(alone),
        f"eager_{GREEDY_BUDGETS[-1]}": asdict(wide),
        "greedy": asdict(ruled),
        "time_over_the_better": fitted.total_ms / min(alone.total_ms, ruled.total_ms),
    }


def recorded_costs(path: Path) -> dict[str, object]:
    """What times are by: the file, the GPU's name, and what was measured where the file is about that alone."""
    found = json.loads(path.read_text())
    gpu = found["gpu"]["name"] if isinstance(found.get("gpu"), dict) else found.get("gpu")
    what = found.get("what") or f"bench_encoder.py's cost tables, commit {found.get('commit')}"
    return {"file": path.name, "gpu": gpu, "what": what}


def show(name: str, found: dict[str, object]) -> None:
    """One block of lines a trace."""
    print(f"{name}: {found['images_counted']} images counted, budgets fitted to {found['images_fitted']}")
    print(f"  budgets {found['budgets']}")
    for way in ("fitted", "greedy", "eager", f"eager_{GREEDY_BUDGETS[-1]}"):
        got = found[way]
        assert isinstance(got, dict)
        print(
            f"  {way:11} padded/real {got['padded_over_real']:.4f}   replayed {100 * got['replayed_share']:5.1f} %   "
            f"{got['total_ms']:9.1f} ms   {got['batches']} batches"
        )
    print(f"  time over the better of greedy and eager: {found['time_over_the_better']:.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Budgets fitted to a trace of images.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="trace.jsonl")
    parser.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
    parser.add_argument("--count", type=int, default=16, help="budgets at most (default 16)")
    parser.add_argument("--largest", type=int, default=4096, help="the largest budget in tokens (default 4096)")
    parser.add_argument("--window", type=int, default=16, help="images that are packed at once (default 16)")
    parser.add_argument("--prefer-replays", type=float, default=0.04, help="how much more eager counts (default 0.04)")
    parser.add_argument("--costs", type=Path, default=DEFAULT_COSTS, help="recorded times (default: an H200's)")
    parser.add_argument("--evaluate", action="store_true", help="fit on the first half, count on the second")
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    asked = parser.parse_args(arguments)
    costs = read_costs(asked.costs, asked.arch)
    found: dict[str, object] = {}
    bounds = Bounds(asked.window, asked.count, asked.largest, asked.prefer_replays)
    for path in asked.traces:
        trace = read_trace(path, RULES[asked.arch])
        if asked.evaluate:
            found[path.stem] = result = evaluate(trace, costs, bounds)
            show(path.stem, result)
        else:
            budgets = bounds.fit(costs, windows(trace, asked.window))
            found[path.stem] = {"budgets": list(budgets)}
            print(f"{path.stem}:\n  encoder_cudagraph_token_budgets: {list(budgets)}")
    report = {
        "benchmark": "fit_budgets",
        "arch": asked.arch,
        "bounds": asdict(bounds),
        "costs": recorded_costs(asked.costs),
        "traces": found,
        **provenance(asked.commit, arguments),
    }
    write(report, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
