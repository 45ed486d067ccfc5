"""`benchmarks/bench_packing.py` on a small made-up trace, and the recorded times that it goes by."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import bench_packing
from benchmarks.trace.costs import read_image_costs
from encoder.packing.cost_based import CostTable, ImageCost
from encoder.packing.greedy import Batch
from planner.recorded_costs import for_budgets, read_costs
from planner.traces import RULES, TraceError

SIZES = [(224, 224), (448, 448), (640, 480), (1024, 768), (512, 384)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    chance = random.Random(1)
    lines = [
        json.dumps({"t": number, "images": [dict(zip("wh", chance.choice(SIZES), strict=True)) for _ in range(2)]})
        for number in range(80)
    ]
    path = tmp_path / "made_up.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"t": 99, "images": []})]) + "\n")
    return path


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_tokens_are_those_of_the_processors(trace: Path) -> None:
    costs = read_image_costs(trace, RULES["qwen3_vl"])
    assert len(costs) == 160
    # Qwen3-VL enlarges 224² to its least area of 256²; Qwen2.5-VL has patches of 14 and keeps it.
    assert {cost.num_tokens for cost in costs} == {64, 196, 300, 768, 192}
    assert min(cost.num_tokens for cost in read_image_costs(trace, RULES["qwen2_5_vl"])) == 64
    assert costs[0].work == pytest.approx((4 * costs[0].num_tokens) ** 2 / 1e6)


def test_the_configured_packer_and_budgets_count(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "packing.json"
    assert bench_packing.main([str(trace), "--out", str(out)]) == 0
    report = report_of(capsys)
    assert json.loads(out.read_text()) == report
    assert (report["packing"], len(report["budgets"]), report["max_images"]) == ("cost", 37, 32)
    assert (report["costs"]["gpu"], report["costs"]["file"]) == ("NVIDIA H200", "ladder_h200.json")
    by_cost = report["traces"]["made_up"]

    config = tmp_path / "serve_config.yaml"
    encoder = {"packing": "greedy", "encoder_cudagraph_token_budgets": [2048, 4096, 8192]}
    config.write_text(yaml.safe_dump({"applications": [{"args": {"encoder": encoder}}]}))
    assert bench_packing.main([str(trace), "--config", str(config)]) == 0
    report = report_of(capsys)
    assert (report["packing"], report["budgets"]) == ("greedy", [2048, 4096, 8192])
    greedy = report["traces"]["made_up"]
    assert greedy["replayed_share"] == 1.0
    assert 1.0 <= by_cost["padded_over_real"] < greedy["padded_over_real"]
    assert by_cost["total_ms"] < greedy["total_ms"]


def test_an_outcome_counts_padding_of_replays_alone() -> None:
    table = CostTable(replay_ms=((128, 2.28),), eager_ms=((60, 3.6), (1000, 13.0)), work_ms=0.0)
    window = [ImageCost(100, 0.0), ImageCost(60, 0.0)]
    found = bench_packing.outcome(table, [(window, [Batch((0,), 128), Batch((1,), None)])])
    assert found.padded_over_real == 1.28
    assert found.replayed_share == 100 / 160
    assert found.batches == 2
    assert found.total_ms == pytest.approx(2.28 + 3.6)


def test_a_runners_own_table_is_read_from_a_ladder(tmp_path: Path) -> None:
    table = {"replay_ms": [[64, 1.0], [128, 3.0]], "eager_ms": [[64, 5.0]], "work_ms": 0.5}
    rows = [{"name": "eager", "facts": {"cost_table": None}}, {"name": "vllm"}]
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"archs": {"qwen3_vl": {"rows": rows}}}))
    with pytest.raises(ValueError, match="no measured cost table"):
        read_costs(path, "qwen3_vl")
    rows.append({"name": "fusion", "facts": {"cost_table": table}})
    path.write_text(json.dumps({"archs": {"qwen3_vl": {"rows": rows}}}))
    found = for_budgets(read_costs(path, "qwen3_vl"), [256, 96, 64])
    assert found.replay_ms == ((64, 1.0), (96, 2.0), (256, 6.0))
    assert (found.eager_ms, found.work_ms) == (((64, 5.0),), 0.5)


@pytest.mark.parametrize("arch", sorted(RULES))
def test_recorded_costs_are_near_what_was_measured(arch: str) -> None:
    """Tables are measured under load and hold replays only: shapes of 1.4 ms have half a millisecond besides."""
    found = json.loads(bench_packing.DEFAULT_COSTS.read_text())["archs"][arch]
    (cells,) = (row["cells"] for row in found["rows"] if row["name"] == "fusion")
    costs = read_costs(bench_packing.DEFAULT_COSTS, arch)
    for shape in found["shapes"]:
        table = for_budgets(costs, [shape["tokens"]])
        got = table.batch_ms([ImageCost(shape["tokens"], shape["work"])], shape["tokens"])
        ms = cells[shape["name"]]["ms"]
        assert got == pytest.approx(ms - 0.5 if shape["tokens"] <= 64 else ms, rel=0.17)


@pytest.mark.parametrize("option", ["--config", "--costs"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\x00", b"[]", b"applications: []", b"applications: [1]", b"x: !!bool 7"]
)
def test_an_unreadable_configuration_or_cost_file_is_refused(
    option: str, content: bytes | None, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    for given in (path, tmp_path):
        with pytest.raises(SystemExit):
            bench_packing.main([str(trace), option, str(given)])
        assert f"{option} {given}: no " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 1: the key 'images' is missing"),
        ('{"images": [{"w": 10}]}', "line 1"),
        ("nonsense", "line 1"),
        ('{"images": []}', "no image"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_image_costs(tmp_path / "bad.jsonl", RULES["qwen3_vl"])
    with pytest.raises(SystemExit, match=message):
        bench_packing.main([str(tmp_path / "bad.jsonl")])
