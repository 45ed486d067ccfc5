"""The encoder benchmark, run for real on tiny towers on the CPU: the record is whole and agrees with itself."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks import bench_encoder
from benchmarks.ladder import ladder, measure, rungs
from benchmarks.ladder.baton import Build, Built, Peer, Run, Sustain, Take, Taken
from benchmarks.ladder.cells import derive, relative_error, relative_errors
from benchmarks.ladder.gpu_clock import Readings
from benchmarks.ladder.measure import Deadline
from benchmarks.ladder.rungs import run_batches
from benchmarks.ladder.text import ladder_table
from benchmarks.ladder.towers import SECTIONS, config_of, random_patches, random_tower, shapes_of
from benchmarks.ladder.turns import FEWEST_ROUNDS, RunFailedError, Spell, Timed
from benchmarks.peers import vllm_tower
from configs.encoder_config import EncoderConfig
from encoder.checkpoint.vision_config import VisionConfig
from encoder.forwards import choose_forward
from encoder.fp8.validation import Agreement
from encoder.runner import TowerRunner
from tests.programs import output_of, output_of_python

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a process, as a user runs it: the last line on stdout, which the file equals."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    told = output_of(
        [sys.executable, "benchmarks/bench_encoder.py", "--device", "cpu", "--tiny", "--only", "eager,cudagraph",
         "--peers", "transformers", "--rounds", "5", "--sustain", "0.01", "--settle", "0", "--sustain-all",
         "--out", str(out), "--plot", str(out.with_suffix(".png")), "--commit", "abc"],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert json.loads(out.read_text()) == found
    assert Image.open(out.with_suffix(".png")).size == (1440, 480 * len(SECTIONS))
    assert "torch compile" not in told
    assert "transformers, eager" in told
    return found


def test_the_record_says_what_is_slower_than_eager(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        assert result["summary"]["labels"] == {"eager": "eager"}
        assert result["summary"]["vllm_best"] == {}
    assert record["summary"]["slower_than_eager"] == {}


def test_record_says_where_it_comes_from(record: dict[str, Any]) -> None:
    assert record["commit"] == "abc"
    assert record["command"][:2] == ["benchmarks/bench_encoder.py", "--device"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["gpu"] is None
    assert record["tiny"] is True


@pytest.mark.parametrize("arch", sorted(SECTIONS))
def test_cells_agree_with_each_other(record: dict[str, Any], arch: str) -> None:
    result = record["archs"][arch]
    assert [row["name"] for row in result["rows"]] == ["eager", "transformers"]
    first, theirs = (row["cells"] for row in result["rows"])
    for shape in result["shapes"]:
        for cell in (first[shape["name"]], theirs[shape["name"]]):
            assert cell["low_ms"] <= cell["ms"] <= cell["high_ms"]
            assert cell["rounds"] == 5
            assert cell["sustained"]["low_ms"] <= cell["sustained"]["ms"] <= cell["sustained"]["high_ms"]
            assert cell["sustained"]["seconds"] >= 0.01
            assert cell["speedup"] == pytest.approx(first[shape["name"]]["ms"] / cell["ms"])
            assert cell["tflops"] == pytest.approx(1e3 * shape["tflop"] / cell["ms"])
            assert cell["peak_share"] == pytest.approx(cell["tflops"] / record["product_tflops"])
            assert len(cell["errors"]) == shape["images"]
            assert cell["error"] == max(cell["errors"])
        # bfloat16 against float32 on the same weights: rounding, and no more than that.
        assert 1e-3 < first[shape["name"]]["error"] < 3e-2
        assert theirs[shape["name"]]["error_over_transformers"] == 1.0
        assert 0.5 < first[shape["name"]]["error_over_transformers"] < 1.5
    for row in result["rows"]:
        assert row["grids"]["batches"] == 2
        assert row["grids"]["cold_ms"] > 0
        assert row["grids"]["warm_ms"] > 0


def test_what_cannot_be_had_is_said(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        assert {entry["name"] for entry in result["skipped"]} == {"cudagraph"}
        assert all(entry["reason"] for entry in result["skipped"])
        assert "skipped: cudagraph" in ladder_table(result)


def test_the_runner_counts_what_was_measured(record: dict[str, Any]) -> None:
    for result in record["archs"].values():
        row = result["rows"][0]
        facts = row["facts"]
        assert facts["forward"] == "eager"
        alone = sum(cell["sustained"]["runs"] for cell in row["cells"].values())
        # Of each of four shapes: the first run, one to warm up, five rounds, one for the error, and those of the
        # sustained run; and of two cold batches four runs each.
        assert facts["counts"]["eager_runs"] == {"graphs_off": 4 * (1 + 1 + 5 + 1) + alone + 2 * 4}
        assert facts["counts"]["replays"] == 0


def test_images_come_back_in_their_order() -> None:
    """Whatever batches a plan makes of them."""
    config = config_of("qwen3_vl", tiny=True, dtype="float32")
    tower = random_tower(config, seed=0, dtype=torch.float32, device=CPU)
    small = EncoderConfig(fused_kernels=False, encoder_cudagraph_token_budgets=(8, 24), warm_image_sizes=())
    runner = TowerRunner.build(choose_forward(tower, small), small)
    grids = [(1, 8, 12), (1, 4, 4), (1, 6, 4), (1, 2, 2)]
    assert len(runner.plan_batches(grids)) > 1
    patches = random_patches(config, sum(t * h * w for t, h, w in grids), seed=1, device=CPU)
    found = run_batches(runner, patches, grids)
    expected = tower(patches, tower.prepare(grids)).split([h * w // 4 for _, h, w in grids])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_layers_and_error_of_fp8_are_told(record: dict[str, Any]) -> None:
    """The table failed on every run with fp8, after the measurement."""
    result = next(iter(record["archs"].values()))
    row = result["rows"][0]
    agreement = Agreement(1.7, 0.79, 0.14, 0.47, 0.8, "qkv of blocks 0-3; MLP of blocks 0-3")
    fp8 = {**row, "label": "graphs + fp8", "facts": {**row["facts"], "fp8": asdict(agreement)}}
    assert (
        "graphs + fp8 (qkv of blocks 0-3; MLP of blocks 0-3), worst of the trial images: error to float32 7.90e-01, "
        "1.70 times its error in bfloat16"
    ) in ladder_table({**result, "rows": [row, fp8]})


def test_errors_on_a_checkpoints_own_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "accuracy.json"
    asked = ["--accuracy", "models/scenes-8m", "--device", "cpu", "--only", "eager,fusion,fp8", "--out", str(out)]
    assert bench_encoder.main(asked) == 0
    told = capsys.readouterr().out
    found = json.loads(told.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert found["rows"]["eager"]["over_bfloat16"] == pytest.approx(1, abs=0.2)
    assert 1e-4 < found["rows"]["eager"]["error"] < 0.05
    assert set(found["skipped"]) == {"fusion", "fp8"}
    assert "until each image's error is at most 3 times its error in bfloat16" in told
    with pytest.raises(SystemExit, match=r"--accuracy: .*there is no such folder"):
        bench_encoder.main(["--accuracy", "./nothing", "--device", "cpu"])


def test_a_rung_that_fails_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str, tower: object, *, limited: bool) -> rungs.Rung:
        if name == "compile":
            raise RuntimeError("no luck")
        return rungs.make_rung(name, tower)  # type: ignore[arg-type]

    monkeypatch.setattr(ladder, "make_rung", broken)
    few = ["--device", "cpu", "--tiny", "--arch", "qwen3_vl", "--only", "eager,compile", "--rounds", "1"]
    few += ["--sustain", "0"]
    assert bench_encoder.main(few) == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["archs"]["qwen3_vl"]
    assert [row["name"] for row in result["rows"]] == ["eager"]
    assert result["skipped"] == [{"name": "compile", "reason": "failed: RuntimeError('no luck')"}]


def test_a_switch_that_is_not_there_leaves_its_rung_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = random_tower(config_of("qwen3_vl", tiny=True, dtype="float32"), seed=0, dtype=torch.float32, device=CPU)
    monkeypatch.setitem(rungs._SWITCHES, "eager", {"warp_drive": True})
    with pytest.raises(rungs.RungUnavailableError, match="no switch warp_drive"):
        rungs.make_rung("eager", tower)


def test_functions_take_turns_until_the_deadline() -> None:
    called: list[str] = []
    ways = {name: (lambda n, name=name: called.append(name)) for name in "ab"}
    times = measure.time_interleaved(ways, rounds=9, warm_ups=1, device=CPU, deadline=Deadline(0.0))
    assert times["a"].rounds == FEWEST_ROUNDS
    assert sorted(called) == ["a"] * (1 + FEWEST_ROUNDS) + ["b"] * (1 + FEWEST_ROUNDS)
    with pytest.raises(RunFailedError, match="b: ZeroDivisionError"):
        measure.time_interleaved({"b": lambda n: 1 / 0}, rounds=1, warm_ups=0, device=CPU, deadline=Deadline(9.0))


def test_the_clock_is_shown_where_it_was_read() -> None:
    cell = {"ms": 1.0, "speedup": 1.0, "tflops": 1.0, "sm_mhz": 1550.0}
    record = {"model": "m", "dtype": "d", "shapes": [{"name": "x"}], "skipped": []}
    row = {"name": "a", "label": "a", "cells": {"x": cell}}
    assert [line.split() for line in ladder_table({**record, "rows": [row]}).splitlines()].count(["a", "1550"]) == 1
    assert "clock" not in ladder_table({**record, "rows": [{**row, "cells": {"x": {**cell, "sm_mhz": None}}}]})


class FakeVllm:
    """A peer of a process of its own with two ways, whose errors it is told to have; counts what it is asked."""

    def __init__(self) -> None:
        self.shape = ""

    def build(self, asked: Build) -> Built:
        assert (Path(asked.checkpoint) / "model.safetensors").exists()
        labels = {"vllm launched eager": "vLLM, eager", "vllm launched graphs fitted": "vLLM, graphs, fitted budgets"}
        return Built(
            labels, {"vllm-fp8 launched": "failed: no fp8 here"}, {"fitted": vllm_tower.fitted_budgets(asked.shapes)}
        )

    def take(self, asked: Take) -> Taken:
        self.shape = asked.shape
        assert asked.reference is not None
        expected = torch.load(asked.reference)
        errors = [float(tokens.float().norm()) for tokens in expected]
        failed = {"vllm launched graphs fitted": "out of memory"} if asked.shape == "mix" else {}
        return Taken({"vllm launched eager": errors}, failed)

    def run(self, asked: Run) -> Timed:
        return Timed(0.5 if asked.name.endswith("eager") else 0.25)

    def sustain(self, asked: Sustain) -> Spell:
        return Spell((0.3, 0.3), 0.0, asked.seconds)


def tiny_ladder(record: dict[str, Any], peer: Peer | None, saved: list[int], minutes: float = 5.0) -> ladder.Ladder:
    return ladder.Ladder(
        "qwen3_vl", ASKED, record, peak_tflops=1.0, deadline=Deadline(60 * minutes), readings=Readings(None),
        save=lambda: saved.append(len(record["rows"])), peer=peer,
    )  # fmt: skip


ASKED = ladder.Options(
    rungs=("eager",), peers=("vllm",), rounds=5, seed=0, tiny=True, dtype=torch.float32, device=CPU, cold_batches=0,
    cold_images=0, settle_s=0.0, sustain_s=0.01, sustain_all=False,
)  # fmt: skip


def test_a_peers_ways_are_rows_like_the_others(tmp_path: Path) -> None:
    record = ladder.new_record("qwen3_vl", ASKED)
    saved: list[int] = []
    with Peer(FakeVllm, tmp_path / "peer.log") as peer:
        tiny_ladder(record, peer, saved).measure()
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["eager", "vllm launched eager", "vllm launched graphs fitted"]
    assert [name for name, row in rows.items() if set(row["cells"]) == {s["name"] for s in record["shapes"]}] == [
        "eager",
        "vllm launched eager",
    ]
    assert "mix" not in rows["vllm launched graphs fitted"]["cells"]
    cell = rows["vllm launched graphs fitted"]["cells"]["1×64²"]
    assert cell["ms"] == 0.25
    assert cell["speedup"] == pytest.approx(rows["eager"]["cells"]["1×64²"]["ms"] / 0.25)
    assert rows["vllm launched eager"]["cells"]["mix"]["error"] > 0
    # Of vLLM's ways the best in turn runs alone, where there is one; ours would be "fusion".
    assert cell["sustained"]["ms"] == 0.3
    assert "sustained" not in rows["vllm launched eager"]["cells"]["1×64²"]
    assert rows["vllm launched eager"]["cells"]["mix"]["sustained"]["ms"] == 0.3
    assert {entry["name"]: entry["reason"] for entry in record["skipped"]} == {
        "vllm-fp8 launched": "failed: no fp8 here",
        "vllm launched graphs fitted, mix": "failed: out of memory",
    }
    assert len(saved) >= 2 * len(record["shapes"])  # after each shape, in turn and alone


def test_a_record_that_is_resumed_is_filled_and_not_measured_again(tmp_path: Path) -> None:
    """A run that was cut short between two shapes goes on there, and does what was left to run alone."""
    record = ladder.new_record("qwen3_vl", ASKED)
    saved: list[int] = []
    with Peer(FakeVllm, tmp_path / "peer.log") as peer:
        tiny_ladder(record, peer, saved).measure()
        first = {row["name"]: dict(row["cells"]["4×64²"]) for row in record["rows"]}
        for row in record["rows"]:
            row["cells"].pop("1×64²")
            row["cells"]["4×64²"].pop("sustained", None)
        tiny_ladder(record, peer, saved).measure()
    for row in record["rows"]:
        assert "1×64²" in row["cells"]
        assert row["cells"]["4×64²"]["ms"] == first[row["name"]]["ms"]
    assert [row["name"] for row in record["rows"] if "sustained" in row["cells"]["4×64²"]] == [
        "vllm launched graphs fitted"
    ]


def test_what_no_time_was_left_for_is_said() -> None:
    record = ladder.new_record("qwen3_vl", ASKED)
    tiny_ladder(record, None, [], minutes=0.0).measure()
    assert record["rows"] == []
    assert {entry["reason"] for entry in record["skipped"]} == {ladder.NO_TIME, "it is not installed here"}


def test_a_report_is_only_resumed_by_the_same_run(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    few = ["--device", "cpu", "--tiny", "--arch", "qwen3_vl", "--only", "eager", "--rounds", "5", "--sustain", "0"]
    assert bench_encoder.main([*few, "--out", str(out), "--commit", "abc"]) == 0
    first = json.loads(out.read_text())
    assert bench_encoder.main([*few, "--out", str(out), "--commit", "abc", "--resume"]) == 0
    resumed = json.loads(out.read_text())
    assert resumed["archs"]["qwen3_vl"]["rows"][0]["cells"] == first["archs"]["qwen3_vl"]["rows"][0]["cells"]
    with pytest.raises(SystemExit, match="has commit 'abc', this run 'abd'"):
        bench_encoder.main([*few, "--out", str(out), "--commit", "abd", "--resume"])
    out.write_text("")
    with pytest.raises(SystemExit, match="is no report"):
        bench_encoder.main([*few, "--out", str(out), "--commit", "abc", "--resume"])


def test_budgets_that_fit_are_filled_by_their_shapes() -> None:
    config = config_of("qwen3_vl", tiny=False, dtype="bfloat16")
    shapes = shapes_of(config, tiny=False)
    budgets = vllm_tower.fitted_budgets(shapes)
    assert budgets[1] == [49, 300, 1024, 2040, 5828]
    assert budgets[16] == [784]
    assert budgets[32] == [512]
    for shape in shapes:
        assert shape.tokens in budgets[len(shape.grids)]
    # vLLM refuses more images than the smallest budget has tokens.
    assert all(vllm_tower.graph_images(images, found) <= min(found) for images, found in budgets.items())


def test_graphs_of_large_budgets_have_room_for_more_images() -> None:
    """One image of 5,828 tokens was captured as 11,656 patches in a row, past vLLM's rotary table."""
    assert vllm_tower.graph_images(1, [49, 300, 1024, 2040, 5828]) == 3
    assert vllm_tower.graph_images(16, [784]) == 16


def test_vllm_compiles_for_the_largest_batch() -> None:
    """It was compiled for one image of 224², for which torch does not pad Qwen2.5-VL's GEMMs of 3420 columns."""
    shapes = shapes_of(config_of("qwen2_5_vl", tiny=False, dtype="bfloat16"), tiny=False)
    assert vllm_tower.compiled_shape(shapes).name == "3×1240×1754"


def test_the_first_row_is_eager_and_errors_are_over_transformers() -> None:
    record = {
        "shapes": [{"name": "x", "tflop": 2.0}],
        "rows": [
            {"name": "vllm a", "cells": {"x": {"ms": 5.0, "errors": [0.02, 0.03]}}},
            {"name": "eager", "cells": {"x": {"ms": 10.0}}},
            {"name": "transformers", "cells": {"x": {"ms": 20.0, "errors": [0.02, 0.01]}}},
        ],
    }
    derive(record, 800.0)
    cell = record["rows"][0]["cells"]["x"]  # type: ignore[index]
    assert (cell["speedup"], cell["tflops"], cell["peak_share"], cell["error"]) == (2.0, 400.0, 0.5, 0.03)
    assert cell["error_over_transformers"] == 3.0


def test_an_error_is_not_finite_if_that_of_any_image_is_not() -> None:
    """Only the first image's NaN made a cell not finite, so that a broken configuration could be vLLM's best."""
    row = {"name": "vllm a", "cells": {"x": {"ms": 5.0, "errors": [0.02, math.nan]}}}
    derive({"shapes": [{"name": "x", "tflop": 2.0}], "rows": [row]}, None)
    assert math.isnan(row["cells"]["x"]["error"])  # type: ignore[index]


@pytest.mark.parametrize("arch", sorted(SECTIONS))
def test_vllm_is_given_the_published_tower(arch: str, tmp_path: Path) -> None:
    path = vllm_tower.published_files(arch, tmp_path / arch)
    assert VisionConfig.from_checkpoint(path) == config_of(arch, tiny=False, dtype="bfloat16")
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config", config)
    assert text["hidden_size"] == SECTIONS[arch]["out_hidden_size"]
    rope = text.get("rope_parameters") or text["rope_scaling"]
    assert 2 * sum(rope["mrope_section"]) == text["hidden_size"] // text["num_attention_heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ladder", "--only", "eager"], "--only for some"),
        (["--only", "eager,fast"], "'fast' is not one of"),
        (["--rounds", "0"], "at least 1"),
        (["--resume"], "--resume needs --out"),
        (["--sustain", "-1"], "at least 0"),
        (["--shapes", "1×1²"], "is not one of"),
        (["--device", "nope"], "'nope' is not one of cpu"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_encoder.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_host_with_torch_alone_can_run_it() -> None:
    """Nothing that it imports needs what only the application needs."""
    absent = ("pydantic", "cachetools", "pebble", "ray", "vllm", "httpx", "starlette", "matplotlib")
    program = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import benchmarks.bench_encoder, benchmarks.ladder.gpu_session, benchmarks.peers.transformers_tower"
    )
    output_of_python(program)


def test_nan_is_an_error_that_shows() -> None:
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))


def test_embeddings_of_other_shapes_are_no_match() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        relative_errors([torch.ones(2, 3)], [torch.ones(2, 4)])
