"""Compares scaling by visual work with Serve's request count on traces: `python benchmarks/simulation/simulate.py
trace.jsonl`.

Both policies are the real code, called as by Serve, in a virtual clock (`benchmarks/simulation/fleet.py`). A trace is
repeated by as many staggered users (`--spread-s`) as keep `--replicas` replicas busy; its own rises and falls are kept.
Serve's policy is swept over its settings, and the best one that costs no more GPU-hours than ours is taken; our
settings are the same few for all traces. The last line on stdout is JSON. Needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig

from benchmarks.record import ROOT, provenance, write
from benchmarks.simulation.fleet import Fleet, FleetModel, Load, Outcome, Policy
from benchmarks.trace.costs import Arrival, read_arrivals, read_image_costs
from deployments.scaling.policies import VisualTokenPolicy
from encoder.checkpoint.image_rules import ImageRules
from planner.recorded_costs import for_budgets, read_costs
from planner.traces import RULES, TraceError

COSTS = ROOT / "benchmarks" / "results" / "ladder_h200.json"
BATCH_TOKENS = 4096
"""Tokens of the full batches whose times, plus attention over each image, determine a replica's speed."""
STEP_S = 0.1
OURS = {"upscale_delay_s": 0, "downscale_delay_s": 0, "look_back_period_s": 11}
OUR_SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"target_utilization": 0.7},
    {"target_utilization": 0.5},
    {"target_utilization": 0.35},
)
"""Our settings for every trace; the first learns from the load how busy replicas should be and how long they stay."""
FIXED_SETTINGS: tuple[dict[str, float], ...] = (
    {},
    *(
        {"target_utilization": share, "scale_down_stabilization_s": window_s}
        for share, window_s in itertools.product((0.3, 0.35, 0.4, 0.5, 0.6, 0.7), (60.0, 120.0, 300.0, 600.0))
    ),
)
"""For `--fixed`: the learnt utilization, and a grid of fixed ones with fixed stabilisation windows."""
GPU_HOURS_ALIKE = 1.005
"""Factor up to which GPU-hours count as equal."""


def read_visual(path: Path, rules: ImageRules) -> list[Arrival]:
    """Returns the requests with new images. Raises TraceError."""
    found = [arrival for arrival in read_arrivals(path, rules) if arrival.images]
    if not found:
        raise TraceError(f"{path.name} has no image")
    return found


def new_tokens(arrival: Arrival) -> int:
    """Returns the tokens of images that must be encoded: those of earlier requests are cached."""
    return sum(image.num_tokens for image in arrival.images)


def tokens_per_s(path: Path, arch: str) -> float:
    """Returns the speed of a replica that encodes the trace's images in full batches, from the recorded cost table."""
    table = for_budgets(read_costs(COSTS, arch), [BATCH_TOKENS])
    ((_, batch_ms),) = table.replay_ms
    images = read_image_costs(path, RULES[arch])
    tokens = sum(image.num_tokens for image in images)
    return tokens * 1e3 / (tokens * batch_ms / BATCH_TOKENS + table.work_ms * sum(image.work for image in images))


def make_load(
    arrivals: Sequence[Arrival], *, tokens_per_s: float, seconds: float, step_s: float = STEP_S, spread_s: float = 1.0
) -> Load:
    """Repeats the trace for `seconds`, with each request multiplied to give `tokens_per_s` on average.

    Copies of a request arrive evenly within `spread_s`.
    """
    once = max(1, round(arrivals[-1].at_s / step_s))
    at = np.minimum([int(arrival.at_s / step_s) for arrival in arrivals], once - 1)
    weights = [(new_tokens(arrival), len(arrival.images), 1) for arrival in arrivals]
    spread = max(1, round(spread_s / step_s))
    repeats = int(np.ceil(seconds / (once * step_s)))
    total = sum(tokens for tokens, _, _ in weights)
    users = tokens_per_s * once * step_s / total
    columns = []
    for column in range(3):
        sums = np.bincount(at, weights=[weight[column] for weight in weights], minlength=once).astype(float)
        smooth = sum((np.roll(sums, shift) for shift in range(spread)), np.zeros(once)) / spread
        columns.append(np.tile(smooth * users, repeats)[: round(seconds / step_s)])
    return Load(step_s, *columns)


@dataclass(frozen=True)
class Scenario:
    """Conditions that are the same for both policies."""

    load: Load
    model: FleetModel
    replicas: int
    target_s: float
    warm_up_s: float
    seed: int

    def ours(self, **arguments: float) -> Outcome:
        policy = VisualTokenPolicy(target_encode_delay_s=self.target_s, **arguments)
        return self._run(policy, AutoscalingConfig.model_validate({**self._bounds(), **OURS}))

    def serves(self, **settings: float) -> Outcome:
        config = AutoscalingConfig.model_validate({**self._bounds(), **settings})
        return self._run(replica_queue_length_autoscaling_policy, config)

    def _bounds(self) -> dict[str, Any]:
        return {"min_replicas": 1, "max_replicas": self.replicas * 8}

    def _run(self, policy: Policy, config: AutoscalingConfig) -> Outcome:
        fleet = Fleet(self.model, policy, config, replicas=2 * self.replicas, seed=self.seed)
        return fleet.run(self.load, target_s=self.target_s, warm_up_s=self.warm_up_s)


def serves_settings(images_per_s: float, model: FleetModel, count: int) -> Iterator[dict[str, float]]:
    """Yields the sweep: requests per replica around those of an always busy one, delays and look-back periods."""
    busy = images_per_s * model.image_s
    targets = [round(float(share) * busy, 3) for share in np.geomspace(0.08, 1.6, count)]
    for target, up, factor, down, back in itertools.product(targets, (0, 30), (1.0, 0.3), (60, 600), (5, 30)):
        yield {
            "target_ongoing_requests": target,
            "upscale_delay_s": up,
            "upscaling_factor": factor,
            "downscale_delay_s": down,
            "look_back_period_s": back,
        }


def summary(outcome: Outcome) -> dict[str, float]:
    late = sorted(outcome.late_s)
    return {
        "missed": outcome.missed,
        "gpu_hours": outcome.gpu_hours,
        "reaction_median_s": float(np.median(late)) if late else 0.0,
        "reaction_worst_s": late[-1] if late else 0.0,
        "most_replicas": outcome.most_replicas,
        "decide_ms": outcome.decide_ms,
    }


def best_settings(swept: Path, trace: str) -> list[dict[str, float]]:
    """Returns Serve's settings that an earlier sweep over the trace found best for any of ours."""
    rows = json.loads(swept.read_text())["traces"][trace]["rows"]
    found = [row[way]["settings"] for row in rows for way in ("serve_for_no_more", "serve_as_good") if way in row]
    return [settings for number, settings in enumerate(found) if settings not in found[:number]]


def compare(
    scene: Scenario, sweep: Sequence[dict[str, float]], ours_with: Sequence[dict[str, float]] = OUR_SETTINGS
) -> dict[str, Any]:
    """Compares ours at a few settings with Serve's: with fewest misses at no more cost, and the cheapest no worse."""
    swept = [(chosen, scene.serves(**chosen)) for chosen in sweep]
    rows: list[dict[str, Any]] = []
    for settings in ours_with:
        ours = scene.ours(**settings)
        row: dict[str, Any] = {"ours": {"settings": settings, **summary(ours)}}
        affordable = [pair for pair in swept if pair[1].gpu_hours <= ours.gpu_hours * GPU_HOURS_ALIKE]
        if affordable:
            chosen, best = min(affordable, key=lambda pair: (pair[1].missed, pair[1].gpu_hours))
            row["serve_for_no_more"] = {"settings": chosen, **summary(best)}
        as_good = [pair for pair in swept if pair[1].missed <= ours.missed]
        if as_good:
            chosen, cheapest = min(as_good, key=lambda pair: pair[1].gpu_hours)
            row["serve_as_good"] = {"settings": chosen, **summary(cheapest)}
        rows.append(row)
    return {"settings_swept": len(swept), "rows": rows}


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['settings_swept']} settings of Serve's policy")
    for row in found["rows"]:
        for way, got in row.items():
            print(
                f"  {way:17} missed {got['missed']:8.3%}  {got['gpu_hours']:7.1f} GPU-hours  late for "
                f"{got['reaction_median_s']:.1f} s (median), {got['reaction_worst_s']:.1f} s (worst)  "
                f"{got['most_replicas']} replicas at most  {got['decide_ms']:.2f} ms a decision  {got['settings']}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Scaling by visual work against Serve's request count, on traces.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="trace.jsonl")
    parser.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
    parser.add_argument(
        "--replicas", type=int, default=64, help="number of replicas that the load keeps busy on average (default 64)"
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="duration of the run (default 1800)")
    parser.add_argument(
        "--warm-up-s", type=float, default=300.0, help="seconds at the start that are not counted (default 300)"
    )
    parser.add_argument("--target-s", type=float, default=1.0, help="target_encode_delay_s (default 1)")
    parser.add_argument("--start-s", type=float, default=30.0, help="start-up time of a replica (default 30)")
    parser.add_argument(
        "--life-s", type=float, default=21_600.0, help="mean time between failures of a replica (default 21600)"
    )
    parser.add_argument(
        "--report-s", type=float, default=10.0, help="seconds between reports; Serve's own interval is 10 (default)"
    )
    parser.add_argument(
        "--spread-s", type=float, default=1.0, help="seconds over which users' requests are spread (default 1)"
    )
    parser.add_argument("--swell", type=float, default=0.0, help="amplitude of the load's sine as a share (default 0)")
    parser.add_argument(
        "--swell-s", type=float, default=900.0, help="period of the load's sine in seconds (default 900)"
    )
    parser.add_argument("--targets", type=int, default=16, help="target_ongoing_requests to try (default 16)")
    parser.add_argument(
        "--fixed", action="store_true", help="sweep fixed settings of our policy instead of Serve's settings"
    )
    parser.add_argument("--best-of", type=Path, help="sweep only the settings that are best in this result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    found: dict[str, Any] = {}
    for path in options.traces:
        speed = tokens_per_s(path, options.arch)
        model = FleetModel(speed, options.start_s, mean_life_s=options.life_s, report_s=options.report_s)
        load = make_load(
            read_visual(path, RULES[options.arch]),
            tokens_per_s=options.replicas * model.tokens_per_s,
            seconds=options.seconds,
            spread_s=options.spread_s,
        )
        load = sine_load(load, options.swell, options.swell_s)
        scene = Scenario(load, model, options.replicas, options.target_s, options.warm_up_s, options.seed)
        images_per_s = model.tokens_per_s * float(load.images.sum() / load.tokens.sum())
        sweep = list(serves_settings(images_per_s, model, options.targets))
        if options.best_of is not None:
            sweep = best_settings(options.best_of, path.stem)
        compared = compare(scene, [], FIXED_SETTINGS) if options.fixed else compare(scene, sweep)
        found[path.stem] = {"model": asdict(model), **compared}
        show(path.stem, found[path.stem])
    report = {
        "benchmark": "simulate",
        "arch": options.arch,
        "replicas": options.replicas,
        "seconds": options.seconds,
        "target_s": options.target_s,
        "best_of": None if options.best_of is None else options.best_of.name,
        "swell": options.swell,
        "swell_s": options.swell_s,
        "traces": found,
        **provenance(options.commit, arguments),
    }
    write(report, options.out)
    return 0


def sine_load(load: Load, share: float, period_s: float) -> Load:
    """Returns the load multiplied by a sine around 1."""
    times = np.arange(len(load.tokens)) * load.step_s
    factor = 1 + share * np.sin(2 * np.pi * times / period_s)
    return Load(load.step_s, load.tokens * factor, load.images * factor, load.requests * factor)


if __name__ == "__main__":
    sys.exit(main())
