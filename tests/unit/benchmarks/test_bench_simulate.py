"""The simulator on cases whose outcome is known by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from benchmarks.simulation import simulate
from benchmarks.simulation.fleet import Fleet, FleetModel, Load, Outcome
from deployments.scaling.policies import VisualTokenPolicy
from planner.traces import RULES

pytestmark = pytest.mark.filterwarnings("ignore:.*look_back_period_s.*:FutureWarning")

MODEL = FleetModel(tokens_per_s=1000, start_s=20, image_s=0.1, report_s=2)
CONFIG = AutoscalingConfig(
    min_replicas=0, max_replicas=50, upscale_delay_s=0, downscale_delay_s=0, look_back_period_s=5
)


def steps(*pieces: tuple[float, float], step_s: float = 0.1, image_tokens: float = 100.0) -> Load:
    """Pieces of seconds and tokens a second."""
    tokens = np.concatenate([np.full(round(seconds / step_s), per_s * step_s) for seconds, per_s in pieces])
    return Load(step_s, tokens, tokens / image_tokens, tokens / image_tokens)


def always(replicas: int) -> Any:
    return lambda ctx: (replicas, {})


def run(policy: Any, load: Load, *, replicas: int, model: FleetModel = MODEL, **more: float) -> Outcome:
    return Fleet(model, policy, CONFIG, replicas=replicas).run(load, target_s=1.0, **more)


def test_enough_replicas_miss_nothing() -> None:
    found = run(always(4), steps((100, 3900)), replicas=4)
    assert (found.missed, list(found.late_s), found.most_replicas) == (0, [], 4)
    assert found.gpu_hours == pytest.approx(400 / 3600)


def test_a_surge_is_late_until_its_backlog_is_worked_off() -> None:
    """10 s of 3000 a second at 2000: 10,000 tokens wait at the end, 5 s of work, gone 10 s later at 1000 spare.

    The delay passes 0.9 s, 0.1 of the target being the image's own, when 1800 wait: 1.8 s into the surge; and falls
    under it 8.2 s after its end.
    """
    found = run(always(2), steps((20, 1000), (10, 3000), (40, 1000)), replicas=2)
    (late_s,) = found.late_s
    assert late_s == pytest.approx(16.4, abs=0.3)
    assert found.missed == pytest.approx((8.2 * 3000 + 8.2 * 1000) / 90_000, rel=0.03)


def test_replicas_start_late_and_cost_from_when_they_are_asked_for() -> None:
    found = run(always(3), steps((60, 1800)), replicas=1)
    # 800 a second too many for 20 s, then 1200 to spare.
    (late_s,) = found.late_s
    assert late_s == pytest.approx(20 - 0.9 / 0.8 + 16_000 / 1200 - 2.7 / 1.2, abs=1.5)
    assert found.gpu_hours == pytest.approx(3 * 60 / 3600, rel=0.01)


def test_what_is_taken_away_starts_last() -> None:
    """Those that are not there yet go first."""
    counts: list[tuple[int, int]] = []

    def policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        counts.append((ctx.current_num_replicas, ctx.target_num_replicas))
        return (6 if len(counts) == 1 else 4), {}

    run(policy, steps((30, 10)), replicas=3)
    assert counts[:3] == [(3, 3), (3, 6), (3, 4)]
    assert counts[-1] == (4, 4)


def test_the_warm_up_is_not_counted() -> None:
    load = steps((10, 5000), (50, 100))
    assert run(always(2), load, replicas=2).missed > 0.5
    assert run(always(2), load, replicas=2, warm_up_s=40).missed == 0
    assert run(always(2), load, replicas=2, warm_up_s=40).gpu_hours == pytest.approx(2 * 20 / 3600)


def test_what_the_policies_are_told() -> None:
    """Requests by Little's law, tokens as they are: 2000 a second, each image 0.1 s under way, nothing waiting."""
    seen: list[tuple[float, float, dict[str, Any]]] = []

    def policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        seen.append((ctx.total_num_requests, ctx.total_queued_requests, ctx.raw_metrics or {}))
        return 4, {}

    run(policy, steps((60, 2000)), replicas=4)
    requests, queued, raw = seen[-1]
    assert requests == pytest.approx(2)
    assert queued == 0
    told = {name: sum(series[-1].value for series in replicas.values()) for name, replicas in raw.items()}
    assert told["arriving_tokens_per_s"] == pytest.approx(2000, rel=0.02)
    assert (told["backlog_tokens"], told["tokens_per_s"] / 4) == (0, 1000)
    assert {len(replicas) for replicas in raw.values()} == {4}


def test_failures_are_replaced_and_cost_capacity() -> None:
    mortal = FleetModel(tokens_per_s=1000, start_s=20, image_s=0.1, report_s=2, mean_life_s=100)
    load = steps((600, 9000))
    assert run(always(10), load, replicas=10).missed == 0
    found = run(always(10), load, replicas=10, model=mortal)
    assert found.missed > 0.5  # two of ten are starting at any time
    assert found.gpu_hours == pytest.approx(10 * 600 / 3600, rel=0.01)


def test_both_real_policies_follow_the_load() -> None:
    load = steps((300, 2000), (300, 10_000), (300, 2000))
    ours = run(VisualTokenPolicy(target_encode_delay_s=1, scale_down_stabilization_s=60), load, replicas=4)
    # An image is under way for 0.1 s: a busy replica has one, and is to have 0.5.
    config = CONFIG.model_copy(update={"target_ongoing_requests": 0.5, "downscale_delay_s": 60.0})
    serves = Fleet(MODEL, replica_queue_length_autoscaling_policy, config, replicas=4).run(load, target_s=1.0)
    for found in (ours, serves):
        assert 13 <= found.most_replicas <= 50
        assert 0 < found.missed < 0.4
        assert len(found.late_s) >= 1


def test_scales_to_zero_and_back() -> None:
    policy = VisualTokenPolicy(target_encode_delay_s=1, scale_down_stabilization_s=30)
    found = run(policy, steps((60, 1500), (300, 0), (100, 1500)), replicas=2)
    assert found.gpu_hours < (2 * 60 + 2 * 120 + 6 * 100) / 3600
    assert 0 < found.missed < 0.7
    assert math.isfinite(max(found.late_s))
    assert max(found.late_s) < 80


@pytest.mark.parametrize("max_scale_up_factor", [2.0, 10.0])
@pytest.mark.parametrize("start_s", [10.0, 30.0])
def test_a_surge_is_over_soon_after_there_are_replicas_for_it(max_scale_up_factor: float, start_s: float) -> None:
    """Ten times the load for 60 s, which 40 replicas keep up with; from then on 30 s at most until none is late."""
    counts: list[tuple[float, int]] = []
    policy = VisualTokenPolicy(
        target_encode_delay_s=1, max_scale_up_factor=max_scale_up_factor, scale_down_stabilization_s=30
    )

    def watched(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        counts.append((ctx.current_time or 0.0, ctx.current_num_replicas))
        return policy(ctx)

    config = CONFIG.model_copy(update={"max_replicas": 400})
    model = FleetModel(tokens_per_s=1000, start_s=start_s, image_s=0.1)
    load = steps((120, 4000), (60, 40_000), (240, 4000))
    found = Fleet(model, watched, config, replicas=10).run(load, target_s=1.0, warm_up_s=60)
    (late_s,) = found.late_s
    capacity_s = next(now for now, running in counts if running >= 40) - 120
    assert late_s + 1.0 <= capacity_s + 30


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    image = {"w": 448, "h": 448}
    lines = [
        {"t": 0.05, "images": [{"id": 1, **image}, {"id": 1, **image}]},
        {"t": 2.0, "images": [{"id": 1, **image}]},
        {"t": 4.0, "images": []},
        {"t": 10.0, "images": [{"id": 2, **image}, {"id": 3, **image}]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_trace_becomes_a_load(trace: Path) -> None:
    """Three images of 196 tokens; the same image again costs nothing."""
    arrivals = simulate.read_visual(trace, RULES["qwen3_vl"])
    assert [[image.num_tokens for image in arrival.images] for arrival in arrivals] == [[196], [196, 196]]
    load = simulate.make_load(arrivals, tokens_per_s=5880, seconds=25, spread_s=1)
    assert len(load.tokens) == 250
    assert load.tokens[:200].sum() == pytest.approx(5880 * 20)
    # A second long each: the first request, and the two images of the last one, which came just before the end.
    assert load.tokens[:10] == pytest.approx(np.array([5880.0] * 9 + [1960.0]))
    assert load.tokens[10:99].sum() == 0
    assert load.tokens.sum() / load.images.sum() == pytest.approx(196)
    assert load.requests[:200].sum() == pytest.approx(load.images[:200].sum() * 2 / 3)
    assert simulate.sine_load(load, 0.5, 20.0).tokens[50:100].sum() > load.tokens[50:100].sum()


def test_the_report(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = [str(trace), "--seconds", "60", "--warm-up-s", "20", "--replicas", "4", "--targets", "2"]
    assert simulate.main([*arguments, "--out", str(out), "--commit", "c"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    found = printed["traces"]["trace"]
    assert found["settings_swept"] == 32
    assert [row["ours"]["settings"] for row in found["rows"]] == list(simulate.OUR_SETTINGS)
    for row in found["rows"]:
        assert {"missed", "gpu_hours", "reaction_worst_s", "decide_ms"} <= row["ours"].keys()
        if other := row.get("serve_for_no_more"):
            assert other["gpu_hours"] <= row["ours"]["gpu_hours"] * simulate.GPU_HOURS_ALIKE
        if other := row.get("serve_as_good"):
            assert other["missed"] <= row["ours"]["missed"]
    again = [*arguments, "--best-of", str(out), "--out", str(tmp_path / "again.json")]
    assert simulate.main([*again, "--commit", "c"]) == 0
    known = json.loads((tmp_path / "again.json").read_text())["traces"]["trace"]
    assert 1 <= known["settings_swept"] <= 2 * len(simulate.OUR_SETTINGS)
    for row, before in zip(known["rows"], found["rows"], strict=True):
        for way in ("serve_for_no_more", "serve_as_good"):
            assert row.get(way, {}).get("missed") == before.get(way, {}).get("missed")
