"""Hit rate of the encoder caches by routing policy: `python benchmarks/bench_affinity.py trace.jsonl`.

Routing (`deployments.routing.affinity`) and caches (`encoder_replica.embedding_cache`) are the application's; the clock
is simulated (`benchmarks/simulation/affinity_replay.py`), and encoding times come from the recorded cost table. An
image that is in a cache or being encoded is a hit. The reference is one cache with the bytes of all replicas, into
which every image is put immediately. The last line on stdout is JSON. Needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import provenance, write
from benchmarks.simulation.affinity_replay import (
    Replay,
    Request,
    Router,
    Scenario,
    distinct_bytes,
    images_of,
    load_of,
    one_cache,
    paced,
    read_requests,
)
from benchmarks.simulation.simulate import tokens_per_s
from deployments.routing.affinity import ActiveCall, Affinity, Call, Work
from planner.traces import RULES

UNBOUNDED = 1e9
DECISIONS = 20_000


class TwoChoices:
    """Serve's power-of-two-choices routing: the replica with fewer calls of two random ones."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._calls = dict.fromkeys(names, 0)
        self._random = random.Random(seed)

    def candidates(self, call: Call) -> list[str]:
        return sorted(self._random.sample(list(self._calls), min(2, len(self._calls))), key=self._calls.__getitem__)

    def begin(self, name: str, call: Call) -> ActiveCall:
        self._calls[name] += 1
        return ActiveCall(name, call.weight, Work.COMPUTE)

    def end(self, active: ActiveCall) -> None:
        self._calls[active.name] -= 1


def affinity(scene: Scenario, load_factor: float, *, separate_cache_hits: bool = True) -> Callable[[int], Router]:
    def make(_: int) -> Router:
        made = Affinity(load_factor=load_factor, separate_cache_hits=separate_cache_hits)
        made.set_replicas(scene.names)
        return made

    return make


def list_policies(scene: Scenario, load_factor: float) -> dict[str, Callable[[int], Router]]:
    """Returns the compared policies by name."""
    return {
        "affinity": affinity(scene, load_factor),
        "one bound for all work": affinity(scene, load_factor, separate_cache_hits=False),
        "affinity without a bound": affinity(scene, UNBOUNDED),
        "power of two choices": lambda seed: TwoChoices(scene.names, seed),
    }


def compare(scene: Scenario, load_factor: float) -> dict[str, Any]:
    measure = one_cache(scene.requests, scene.cache_bytes)
    rows: dict[str, Any] = {}
    for name, make_router in list_policies(scene, load_factor).items():
        found = Replay(scene, make_router).run()
        tokens = list(found.by_replica.values())
        rows[name] = {
            "hit_rate": found.hit_rate,
            "of_one_cache": found.hit_rate / measure,
            "busiest_over_mean": max(tokens) * len(tokens) / sum(tokens),
            "mean_wait_ms": found.waited_s / found.encoded * 1e3,
            **{key: value for key, value in asdict(found).items() if key not in ("by_replica", "waited_s")},
        }
    return {"one_cache": measure, "ways": rows}


def decision_us(replicas: int, load_factor: float) -> float:
    """Returns the CPU time in microseconds of a choice and its accounting, with 64 calls in flight."""
    made = Affinity(load_factor=load_factor, separate_cache_hits=True)
    made.set_replicas([f"replica {number}" for number in range(replicas)])
    keys = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4 for number in range(DECISIONS)]
    under_way: deque[ActiveCall] = deque()
    began = time.thread_time()
    for key in keys:
        call = Call.from_session_id(Call(key, 100).to_session_id())
        name = made.candidates(call)[0]
        begun = made.begin(name, call)
        assert begun is not None
        under_way.append(begun)
        if len(under_way) > 64:
            made.end(under_way.popleft())
    return (time.thread_time() - began) / DECISIONS * 1e6


def show(scene: Scenario, busy: float, found: dict[str, Any]) -> None:
    print(f"{scene.ingresses} ingress, {busy:.2f} busy: one cache hits {found['one_cache']:.4f}")
    for name, row in found["ways"].items():
        print(
            f"  {name:28} hits {row['hit_rate']:.4f}, {row['of_one_cache']:.1%} of one cache; "
            f"{row['encoded']} encoded; "
            f"busiest {row['busiest_over_mean']:.2f} of the mean; {row['mean_wait_ms']:.1f} ms wait",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hit rate of encoder replicas' caches by the way of routing.")
    parser.add_argument("trace", type=Path, metavar="trace.jsonl")
    parser.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument(
        "--cache-share",
        type=float,
        default=0.25,
        help="total size of all caches, as a share of the distinct bytes (default 0.25)",
    )
    parser.add_argument("--load-factor", type=float, default=1.25)
    parser.add_argument(
        "--ingresses", type=int, nargs="+", default=[1, 4], help="number of routers, which exchange little information"
    )
    parser.add_argument(
        "--busy", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5],
        help="replica utilisation if nothing were cached; 0: the trace's own pace (default 0 0.5 1 1.5)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    requests: list[Request] = read_requests(options.trace, RULES[options.arch])
    speed = tokens_per_s(options.trace, options.arch)
    own = load_of(requests, options.replicas, speed)
    num_bytes = distinct_bytes(requests)
    runs: list[dict[str, Any]] = []
    for ingresses in options.ingresses:
        for busy in options.busy:
            at_pace = paced(requests, busy / own) if busy else requests
            cache_bytes = int(num_bytes * options.cache_share)
            scene = Scenario(at_pace, options.replicas, cache_bytes, speed, ingresses)
            found = compare(scene, options.load_factor)
            show(scene, busy or own, found)
            runs.append({"ingresses": ingresses, "busy": busy or own, **found})
    times = {str(replicas): decision_us(replicas, options.load_factor) for replicas in (1, 4, 64)}
    print("a decision takes", ", ".join(f"{took:.0f} µs with {count} replicas" for count, took in times.items()))
    report = {
        "benchmark": "affinity",
        "trace": options.trace.stem,
        "arch": options.arch,
        "replicas": options.replicas,
        "load_factor": options.load_factor,
        "images": sum(1 for _ in images_of(requests)),
        "distinct_bytes": num_bytes,
        "cache_bytes": int(num_bytes * options.cache_share),
        "tokens_per_s": speed,
        "decision_us": times,
        "runs": runs,
        **provenance(options.commit, arguments),
    }
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
