"""Placement of images on many hosts, in virtual time: `python benchmarks/simulation/many_hosts.py busy`.

Routing, admission, queues, coalescing and caches are the application's; time, devices and network are simulated
(`benchmarks/simulation/host_fleet.py`). Three experiments:

- locality: bytes between hosts, cache hits relative to one joint cache, and TTFT relative to an oracle that has one
  queue and one cache for all replicas, with conversations made of the trace's requests.
- busy: the wait for an encoder by utilisation, with the load bound of the ingresses, and with encoders that refuse an
  image before which they have too much work. Every image is new, unless a trace is given.
- knee: TTFT of prompts with three images by the rate of requests, beside random choice and round robin.

The last line on stdout is JSON. Needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.record import provenance, write
from benchmarks.simulation.conversations import (
    Question,
    Turn,
    conversations,
    grouped_prompts,
    read_questions,
    single_images,
)
from benchmarks.simulation.host_fleet import HostFleet, Layout, Outcome, Placement, Rule
from benchmarks.simulation.host_nodes import Source, Speeds
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from planner.traces import RULES, image_cost

GIB = 1024**3
NEW_IMAGE_TOKENS = 992
"""Mean of new images in the experiment "busy": 12.4 ms of an encoder."""
NEW_IMAGE_SPREAD = 0.6
LOCALITY = {
    "near": Rule(),
    "near, leaving a host costs nothing": Rule(earlier_image_cost=0),
    "near, never leaving a host": Rule(earlier_image_cost=10**9),
    "near, no directory": Rule(directory_entries=0),
    "anywhere": Rule(Placement.ANYWHERE),
    "encoder oracle": Rule(Placement.ENCODER_ORACLE),
    "oracle": Rule(Placement.ORACLE),
}
KNEE = {
    "affinity": Rule(),
    "random": Rule(Placement.RANDOM),
    "round robin": Rule(Placement.ROUND_ROBIN),
    "oracle": Rule(Placement.ORACLE),
}


def one_cache(turns: Sequence[Turn], num_bytes: int, from_s: float) -> tuple[float, int]:
    """Returns the hit rate from `from_s` on of one cache into which every image is put immediately, and the tokens that
    it misses."""
    cache: EmbeddingCache[bool] = EmbeddingCache(num_bytes)
    hits = images = missed = 0
    for turn in turns:
        for image in turn.images:
            hit, measured = cache.get(image.digest) is not None, turn.at_s >= from_s
            images, hits = images + measured, hits + (hit and measured)
            if not hit:
                missed += image.num_tokens * measured
                cache.put(image.digest, True, image.num_bytes)
    return hits / images, missed


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) if seconds else (0.0, 0.0)
    return {"mean": float(np.mean(seconds or [0.0])) * 1e3, "p50": float(p50) * 1e3, "p99": float(p99) * 1e3}


def summary(found: Outcome, span_s: float) -> dict[str, Any]:
    """Returns the figures of a run whose measured turns arrived within `span_s`."""
    images = max(sum(found.images.values()), 1)  # none if all prompts are in prefix caches
    total = max(found.bytes_on_host + found.bytes_between, 1)
    return {
        "images_per_s": images / span_s,
        "hit_rate": found.hit_rate,
        "sources": {source.value: count / images for source, count in found.images.items()},
        "encodings_per_s": found.images[Source.ENCODED] / span_s,
        "between_hosts": found.bytes_between / total,
        "between_hosts_bytes_per_s": found.bytes_between / span_s,
        "wait_ms": percentiles_ms(found.waits_s),
        "ready_ms": percentiles_ms(found.ready_s),
        "ttft_ms": percentiles_ms(found.ttfts_s),
        "encoder_utilization": found.encoder_utilization,
        "model_utilization": found.model_utilization,
        "busiest_over_mean": found.busiest_over_mean,
        "encoder_calls_per_s": found.encoder_calls / span_s,
        "refusals_per_call": found.refusals / max(found.encoder_calls, 1),
        "not_at_best_encoder": found.spills / max(found.encoder_calls - found.refusals, 1),
        "stale": found.stale / images,
        "moved_turns": found.moved_turns / max(found.later_turns, 1),
        "requests_shed": found.shed,
    }


def show(name: str, row: Mapping[str, Any]) -> None:
    wait, ttft = row["wait_ms"], row["ttft_ms"]
    print(
        f"  {name:36} hits {row['hit_rate']:.1%}; between hosts {row['between_hosts']:.1%}, "
        f"{row['between_hosts_bytes_per_s'] / 1e9:.2f} GB/s; wait {wait['p50']:.1f}, p99 {wait['p99']:.1f} ms; "
        f"TTFT {ttft['p50']:.1f}, p99 {ttft['p99']:.0f} ms; utilisation {row['encoder_utilization']:.2f}, "
        f"{row['model_utilization']:.2f}; refused {row['refusals_per_call']:.1%}; moved {row['moved_turns']:.1%}; "
        f"shed {row['requests_shed']}",
        flush=True,
    )


def locality(options: argparse.Namespace) -> list[dict[str, Any]]:
    questions = read_questions(options.trace, RULES[options.arch])
    layout, from_s = layout_of(options), options.seconds / 2
    runs = []
    for utilization in options.utilization:
        speed = Speeds(link_bytes_per_s=options.link_gbit * 1e9 / 8)
        tokens_per_s = utilization * options.models * speed.prefill_tokens_per_s
        turns = talk(options, questions, tokens_per_s)
        for cache_gib in options.cache_gib:
            joint, missed = one_cache(turns, int(cache_gib * GIB) * options.encoders, from_s)
            if options.encoders_alike:
                share = missed / from_s / options.encoders / speed.tokens_per_s
                speed = replace(speed, tokens_per_s=speed.tokens_per_s * share / utilization)
            print(f"{cache_gib:g} GiB an encoder, models {utilization:g} busy; one cache hits {joint:.1%}")
            rows = {}
            for name, rule in LOCALITY.items():
                if options.rules and name not in options.rules:
                    continue
                fleet = HostFleet(
                    layout,
                    with_backlog(rule, options),
                    speed,
                    cache_bytes=int(cache_gib * GIB),
                    prefix_tokens=options.prefix_tokens,
                    measure_from_s=from_s,
                    seed=options.seed,
                )
                rows[name] = summary(fleet.run(turns), from_s)
                rows[name]["of_one_cache"] = rows[name]["hit_rate"] / joint
                show(name, rows[name])
            runs.append(
                {
                    "utilization": utilization,
                    "cache_gib": cache_gib,
                    "encoder_tokens_per_s": speed.tokens_per_s,
                    "one_cache": joint,
                    "rules": rows,
                }
            )
    return runs


def talk(options: argparse.Namespace, questions: Sequence[Question], tokens_per_s: float) -> list[Turn]:
    return conversations(
        questions, seconds=options.seconds, tokens_per_s=tokens_per_s, think_s=options.think_s, seed=options.seed
    )


def busy(options: argparse.Namespace) -> list[dict[str, Any]]:
    layout, from_s = layout_of(options), options.seconds / 6 if options.trace is None else options.seconds / 2
    cache_bytes = int(options.cache_gib * GIB)
    runs = []
    for utilization in options.utilization:
        speed = Speeds(prefill_tokens_per_s=1e9)  # only encoders are short
        tokens_per_s = utilization * options.encoders * speed.tokens_per_s
        joint = 0.0
        if options.trace is None:
            turns = single_images(
                seconds=options.seconds,
                per_s=tokens_per_s / NEW_IMAGE_TOKENS,
                mean_tokens=NEW_IMAGE_TOKENS,
                spread=NEW_IMAGE_SPREAD,
                seed=options.seed,
            )
        else:
            questions = read_questions(options.trace, RULES[options.arch])
            rate = tokens_per_s
            for _ in range(3):  # more conversations hit less
                turns = talk(options, questions, rate)
                joint, missed = one_cache(turns, cache_bytes * options.encoders, from_s)
                rate *= tokens_per_s * (options.seconds - from_s) / missed
        print(f"encoders {utilization:g} busy; one cache hits {joint:.1%}")
        rows = {}
        for name, (rule, floor, refusals) in busy_rules(options).items():
            fleet = HostFleet(layout, rule, speed, cache_bytes=cache_bytes, measure_from_s=from_s, seed=options.seed)
            with (
                patch("deployments.routing.affinity.FREE_CALLS", floor),
                patch("deployments.routing.affinity.MAX_REFUSALS", refusals),
            ):
                rows[name] = summary(fleet.run(turns), options.seconds - from_s)
            show(name, rows[name])
        runs.append({"utilization": utilization, "one_cache": joint, "rules": rows})
    return runs


def busy_rules(options: argparse.Namespace) -> dict[str, tuple[Rule, int, int]]:
    """Returns the compared rules, each with the floor of the load bound and the number of refusals."""
    rules = {f"bound at ingresses, floor {floor}": (Rule(), floor, 0) for floor in options.floor}
    for refusals in options.refusals:
        for bound_ms in options.max_backlog_ms:
            name = f"busy over {bound_ms:g} ms, {refusals} refusals"
            rules[name] = Rule(max_backlog_s=bound_ms / 1e3), 2, refusals
    return rules | {"oracle": (Rule(Placement.ENCODER_ORACLE), 2, 0)}


def knee(options: argparse.Namespace) -> list[dict[str, Any]]:
    layout, from_s = layout_of(options), options.seconds / 4
    speed = Speeds()
    tokens = image_cost({"w": options.width, "h": options.height}, RULES[options.arch]).num_tokens
    prompts_per_s = options.models * speed.prefill_tokens_per_s / (100 + options.images * tokens)
    runs = []
    for groups in (None, *options.groups):
        for share in options.rates:
            turns = grouped_prompts(
                seconds=options.seconds,
                per_s=share * prompts_per_s,
                images=options.images,
                image_tokens=tokens,
                groups=groups,
                seed=options.seed,
            )
            print(f"{groups or 'all'} different prompts, {share * prompts_per_s:.0f} a second, {share:g} of capacity")
            rows = {}
            for name in options.rules:
                fleet = HostFleet(
                    layout,
                    with_backlog(KNEE[name], options),
                    speed,
                    cache_bytes=int(options.cache_gib * GIB),
                    prefix_tokens=options.prefix_tokens,
                    measure_from_s=from_s,
                    seed=options.seed,
                )
                rows[name] = summary(fleet.run(turns), options.seconds - from_s)
                show(name, rows[name])
            runs.append({"prompts": groups, "rate": share, "prompts_per_s": share * prompts_per_s, "rules": rows})
    return runs


def with_backlog(rule: Rule, options: argparse.Namespace) -> Rule:
    return replace(rule, max_backlog_s=options.max_backlog_ms and options.max_backlog_ms / 1e3)


def layout_of(options: argparse.Namespace) -> Layout:
    return Layout.even(options.hosts, options.encoders, options.models, options.ingresses)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Placement of images on many hosts, in virtual time.")
    experiments = parser.add_subparsers(dest="experiment", required=True)

    def add(name: str, run: Any, *, hosts: int, encoders: int, models: int, ingresses: int, seconds: float) -> Any:  # noqa: ANN401 - argparse
        one = experiments.add_parser(name)
        one.set_defaults(run=run)
        for option, default in (
            ("hosts", hosts), ("encoders", encoders), ("models", models), ("ingresses", ingresses), ("seed", 0)
        ):  # fmt: skip
            one.add_argument(f"--{option}", type=int, default=default)
        one.add_argument("--seconds", type=float, default=seconds, help="simulated time; the later part is measured")
        one.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
        one.add_argument("--out", type=Path, help="also write the JSON to this file")
        one.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
        return one

    found = add("locality", locality, hosts=12, encoders=64, models=32, ingresses=96, seconds=80)
    found.add_argument("trace", type=Path, metavar="trace.jsonl")
    found.add_argument("--utilization", type=float, nargs="+", default=[0.7], help="of the language models")
    found.add_argument("--cache-gib", type=float, nargs="+", default=[4.0, 32.0], help="of each encoder")
    found.add_argument("--prefix-tokens", type=int, default=0, help="prefix cache of each language model (default 0)")
    found.add_argument("--link-gbit", type=float, default=100.0, help="of each host")
    found.add_argument("--think-s", type=float, default=15.0, help="mean time between turns of a conversation")
    found.add_argument(
        "--encoders-alike", action="store_true", help="slow encoders down until they are as busy as the models"
    )
    found.add_argument("--rules", nargs="+", choices=list(LOCALITY), help="default: all")
    found.add_argument("--max-backlog-ms", type=float, help="an encoder with more work refuses an image")

    found = add("busy", busy, hosts=12, encoders=64, models=32, ingresses=96, seconds=12)
    found.add_argument("trace", type=Path, metavar="trace.jsonl", nargs="?", help="default: all images are new")
    found.add_argument("--utilization", type=float, nargs="+", default=[0.7, 0.85, 0.95], help="of the encoders")
    found.add_argument("--max-backlog-ms", type=float, nargs="+", default=[10, 20, 30, 40, 60, 80])
    found.add_argument("--refusals", type=int, nargs="*", default=[2], help="most encoders that may refuse an image")
    found.add_argument("--floor", type=int, nargs="*", default=[0, 1, 2], help="images over the mean that may be sent")
    found.add_argument("--cache-gib", type=float, default=32.0, help="of each encoder")
    found.add_argument("--think-s", type=float, default=5.0, help="mean time between turns of a conversation")

    found = add("knee", knee, hosts=4, encoders=16, models=16, ingresses=8, seconds=40)
    found.add_argument("--images", type=int, default=3)
    found.add_argument("--width", type=int, default=1280)
    found.add_argument("--height", type=int, default=720)
    found.add_argument(
        "--rates", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.8, 0.9, 1.0],
        help="requests, as a share of those that the language models can prefill if nothing is cached",
    )  # fmt: skip
    found.add_argument("--groups", type=int, nargs="*", default=[200], help="numbers of different prompts")
    found.add_argument("--prefix-tokens", type=int, default=500_000, help="prefix cache of each language model")
    found.add_argument("--cache-gib", type=float, default=4.0, help="of each encoder")
    found.add_argument("--rules", nargs="+", choices=list(KNEE), default=list(KNEE))
    found.add_argument("--max-backlog-ms", type=float, help="an encoder with more work refuses an image")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    settings = {
        key: value.stem if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in ("run", "out", "commit")
    }
    report = {
        "benchmark": "hosts",
        **settings,
        "speeds": vars(Speeds()),
        "runs": options.run(options),
        **provenance(options.commit, arguments),
    }
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
