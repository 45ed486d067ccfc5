"""GPUs shifted between encoders and language models against every fixed split of them, in a virtual clock.

`python benchmarks/simulate_proportion.py documents.jsonl chat.jsonl`: the traces take turns, so that now images are the
most of the work and now answers are. The decisions are the application policy's own (`deployments/proportion.py`). Work
flows in steps; encoders take tokens first come first served, language models hold so many requests each, every one for
as long as its answer takes. The last line on stdout is JSON. Needs no GPU and no cluster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt

from benchmarks.record import provenance, write
from benchmarks.simulate import new_tokens, read_visual, tokens_per_s
from deployments.llm_scaling import LLMLoad, LLMTargets
from deployments.pace import ARRIVALS_OVER_S
from deployments.proportion import Bounds, IngressLoad, Pool, ProportionScaler
from deployments.scaling_policy import ScalingTargets, VisualLoad
from encoder.traces import RULES

STEP_S = 0.5
DECIDE_S = 1.0
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machines:
    """How replicas behave, one GPU each."""

    tokens_per_s: float
    """Of an encoder."""
    at_once: float = 64.0
    """Requests that a language model answers at once; more wait."""
    answer_s: float = 8.0
    """From the first token to the last."""
    start_s: float = 30.0
    report_s: float = 10.0


@dataclass(frozen=True)
class Arrivals:
    """In each step: visual tokens, requests with images and requests without, `[steps]` each."""

    tokens: Numbers
    visual: Numbers
    text: Numbers


def arrivals_of(path: Path, arch: str, machines: Machines, *, gpus: float, seconds: float) -> Arrivals:
    """The trace over and over, by as many users as keep `gpus` GPUs busy, encoders and language models together."""
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    once = max(1, round(requests[-1]["t"] / STEP_S))
    at = np.minimum([int(request["t"] / STEP_S) for request in requests], once - 1)
    holds = np.array([bool(request["images"]) for request in requests], float)
    new = read_visual(path, RULES[arch])
    new_at = np.minimum([int(arrival.at_s / STEP_S) for arrival in new], once - 1)
    tokens = np.bincount(new_at, weights=[new_tokens(arrival) for arrival in new], minlength=once)
    columns = [
        tokens,
        np.bincount(at, weights=holds, minlength=once),
        np.bincount(at, weights=1 - holds, minlength=once),
    ]
    busy = (tokens.sum() / machines.tokens_per_s + len(requests) * machines.answer_s / machines.at_once) / (
        once * STEP_S
    )
    repeats = int(np.ceil(seconds / (once * STEP_S)))
    smooth = max(1, round(2.0 / STEP_S))
    spread = [sum((np.roll(column, shift) for shift in range(smooth)), np.zeros(once)) / smooth for column in columns]
    return Arrivals(*(np.tile(column * gpus / busy, repeats)[: round(seconds / STEP_S)] for column in spread))


def in_turns(parts: Sequence[Arrivals], rounds: int) -> Arrivals:
    """One part after the other, all of it so many times."""
    return Arrivals(
        *(np.concatenate([getattr(part, name) for part in parts] * rounds) for name in ("tokens", "visual", "text"))
    )


class Stage:
    """Replicas of one kind; those that were asked for start late, those that are to go are gone at once."""

    def __init__(self, replicas: int, start_s: float) -> None:
        self.running = replicas
        self._starting: deque[float] = deque()
        self._start_s = start_s

    @property
    def asked_for(self) -> int:
        return self.running + len(self._starting)

    def ask(self, now: float, wanted: int) -> None:
        while self._starting and self.asked_for > wanted:
            self._starting.pop()
        self.running = min(self.running, wanted)
        self._starting.extend([now + self._start_s] * (wanted - self.asked_for))

    def tick(self, now: float) -> None:
        while self._starting and self._starting[0] <= now:
            self._starting.popleft()
            self.running += 1


def run(
    arrivals: Arrivals,
    machines: Machines,
    replicas: tuple[int, int],
    *,
    target_s: float,
    scaler: ProportionScaler | None,
    gpus: int,
) -> dict[str, float]:
    """Missed requests and GPU-hours; without a scaler the split stays."""
    encoders, llms = Stage(replicas[0], machines.start_s), Stage(replicas[1], machines.start_s)
    bounds = (Bounds(1, gpus), Bounds(1, gpus))
    tokens_in, visual_in, text_in = (np.cumsum(column) for column in (arrivals.tokens, arrivals.visual, arrivals.text))
    encoded_at, begun_at, came = [], [], []
    tokens_done = encoded = coming = begun = running = arriving = hours = 0.0
    told: tuple[VisualLoad, LLMLoad, IngressLoad] | None = None
    kept = float(np.exp(-STEP_S / ARRIVALS_OVER_S))
    for step in range(len(tokens_in)):
        now = step * STEP_S
        encoders.tick(now)
        llms.tick(now)
        arriving = arriving * kept + float(arrivals.tokens[step])
        tokens_done = min(float(tokens_in[step]), tokens_done + encoders.running * machines.tokens_per_s * STEP_S)
        encoded = max(encoded, float(np.interp(tokens_done, tokens_in, visual_in)))
        if tokens_done >= tokens_in[step]:
            encoded = float(visual_in[step])
        encoded_at.append(encoded)
        running -= running * min(1.0, STEP_S / machines.answer_s)
        coming = encoded + float(text_in[step])
        came.append(coming)
        room = max(0.0, llms.running * machines.at_once - running)
        starts = min(room, coming - begun)
        begun, running = begun + starts, running + starts
        begun_at.append(begun)
        hours += (encoders.asked_for + llms.asked_for) * STEP_S / 3600
        if scaler is None or now % DECIDE_S:
            continue
        if told is None or now % machines.report_s == 0:
            told = (
                VisualLoad(
                    now_s=now,
                    running=encoders.running,
                    asked_for=encoders.asked_for,
                    backlog_tokens=float(tokens_in[step]) - tokens_done,
                    waiting_images=0.0,
                    arriving_tokens_per_s=arriving / ARRIVALS_OVER_S,
                    tokens_per_s=machines.tokens_per_s,
                    tokens_per_image=None,
                ),
                LLMLoad(
                    now_s=now,
                    running=llms.running,
                    asked_for=llms.asked_for,
                    running_requests=running,
                    waiting_requests=coming - begun,
                    coming_requests=0.0,
                    kv_cache_use=0.0,
                ),
                IngressLoad(),
            )
        visual, engines, ingress = told
        current = {"now_s": now}
        visual = VisualLoad(
            **{**asdict(visual), **current, "running": encoders.running, "asked_for": encoders.asked_for}
        )
        engines = LLMLoad(**{**asdict(engines), **current, "running": llms.running, "asked_for": llms.asked_for})
        wanted = scaler.replicas(visual, engines, ingress, bounds=bounds)
        encoders.ask(now, wanted[0])
        llms.ask(now, wanted[1])
    return {"missed": _missed(arrivals, visual_in, encoded_at, came, begun_at, target_s), "gpu_hours": hours}


def _missed(
    arrivals: Arrivals,
    visual_in: Numbers,
    encoded_at: list[float],
    came: list[float],
    begun_at: list[float],
    target_s: float,
) -> float:
    """The share of requests whose answer began later than the target after they came."""
    steps = np.arange(len(visual_in))
    slack = 1e-9 * max(1.0, came[-1])
    at_llm = np.minimum(np.searchsorted(encoded_at, visual_in - slack), len(steps) - 1)
    begins = np.searchsorted(begun_at, np.array(came) - slack)
    late_visual = (begins[at_llm] - steps) * STEP_S > target_s
    late_text = (begins - steps) * STEP_S > target_s
    late = float(arrivals.visual[late_visual].sum() + arrivals.text[late_text].sum())
    return late / float(arrivals.visual.sum() + arrivals.text.sum())


def compare(arrivals: Arrivals, machines: Machines, gpus: int, target_s: float) -> dict[str, Any]:
    """The policy, and each fixed split."""
    half = (gpus // 2, gpus - gpus // 2)

    def shifting(use_all: bool) -> dict[str, float]:
        targets = ScalingTargets(target_encode_delay_s=target_s), LLMTargets(target_requests=machines.at_once)
        scaler = ProportionScaler(*targets, Pool(gpus, use_all=use_all))
        return run(arrivals, machines, half, target_s=target_s, scaler=scaler, gpus=gpus)

    fixed = {
        encoders: run(arrivals, machines, (encoders, gpus - encoders), target_s=target_s, scaler=None, gpus=gpus)
        for encoders in range(1, gpus)
    }
    best = min(fixed, key=lambda encoders: fixed[encoders]["missed"])
    return {
        "as_needed": shifting(False),
        "all_in_use": shifting(True),
        "best_fixed": {"encoders": best, **fixed[best]},
        "half_fixed": fixed[half[0]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="GPUs shifted between encoders and language models, on traces.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="trace.jsonl", help="that take turns")
    parser.add_argument("--arch", choices=sorted(RULES), default="qwen3_vl")
    parser.add_argument("--gpus", type=int, default=16, help="for both together (default 16)")
    parser.add_argument("--busy", type=float, default=0.5, help="share of them that the load keeps busy (default 0.5)")
    parser.add_argument("--turn-s", type=float, default=600.0, help="of one trace (default 600)")
    parser.add_argument("--rounds", type=int, default=2, help="of all traces (default 2)")
    parser.add_argument("--target-s", type=float, default=2.0, help="until an answer begins (default 2)")
    parser.add_argument("--answer-s", type=float, default=8.0, help="an answer takes (default 8)")
    parser.add_argument("--start-s", type=float, default=30.0, help="a replica's start (default 30)")
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    asked = parser.parse_args(arguments)
    speed = tokens_per_s(asked.traces[0], asked.arch)
    machines = Machines(speed, answer_s=asked.answer_s, start_s=asked.start_s)
    parts = [
        arrivals_of(path, asked.arch, machines, gpus=asked.gpus * asked.busy, seconds=asked.turn_s)
        for path in asked.traces
    ]
    found = compare(in_turns(parts, asked.rounds), machines, asked.gpus, asked.target_s)
    for way, got in found.items():
        encoders = f", {got['encoders']} encoders" if "encoders" in got else ""
        print(f"{way:11} missed {got['missed']:7.2%}  {got['gpu_hours']:6.1f} GPU-hours{encoders}", flush=True)
    report = {
        "benchmark": "simulate_proportion",
        "traces": [path.stem for path in asked.traces],
        "gpus": asked.gpus,
        "busy": asked.busy,
        "turn_s": asked.turn_s,
        "target_s": asked.target_s,
        "machines": asdict(machines),
        **found,
        **provenance(asked.commit, arguments),
    }
    write(report, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
