"""`vitray plan` on small made-up traces; what they print is held to the real checks."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from configs.schema import AppConfig
from deployments.cli import config_check
from deployments.cli import main as cli
from deployments.cli import plan as plan_command
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.packing.cost_based import ImageCost
from encoder.video.bounds import VideoBounds
from encoder.video.header import VideoHeader, read_header
from encoder.video.plan import VideoPlan
from planner import configuration, overheads, traces
from planner.model import Layout, Placement
from planner.recorded_costs import read_costs, read_vllm_costs
from planner.traces import TraceError, read_requests
from tests.video_files import Clip

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "results"
LADDER = RESULTS / overheads.COSTS_FILE
RULES = ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216)
SCENES = ROOT / "models" / "scenes-8m"
SCENES_RULES = ImageRules.from_checkpoint(SCENES)
VIDEO_RULES = VideoRules.from_checkpoint(SCENES, "qwen3_vl", SCENES_RULES)
MODEL = "Qwen/Qwen3-VL-8B-Instruct"
SPEEDS = ("--prefill-tokens-per-s", "20000", "--decode-tokens-per-s", "3000")


def trace(path: Path, sizes: Sequence[tuple[int, int]], *, every_s: float, images: int) -> Path:
    chance = random.Random(1)
    lines = []
    for number in range(200):
        shown = [dict(zip("wh", chance.choice(sizes), strict=True)) | {"id": number * 10 + n} for n in range(images)]
        lines.append({"t": number * every_s, "images": shown, "prompt_tokens": 20, "output_tokens": 50})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A thumbnail a second."""
    return trace(tmp_path / "small.jsonl", [(224, 224), (300, 200)], every_s=1.0, images=1)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Six pages of print every second: 0.2 to 0.3 s of encoding, and as many seconds of prefill as --speeds say."""
    return trace(tmp_path / "pages.jsonl", [(1240, 1754), (1024, 1448)], every_s=1.0, images=6)


def plan(file: Path, *more: str, speeds: Sequence[str] = SPEEDS) -> Result:
    return plan_for(file, MODEL, "--arch", "qwen3_vl", *more, speeds=speeds)


def plan_for(file: Path, model: str | Path, *more: str, speeds: Sequence[str] = SPEEDS) -> Result:
    return CliRunner().invoke(
        cli.main, ["plan", "--trace", str(file), "--model", str(model), "--slo", "2", *speeds, *more]
    )


def checkpoint(folder: Path, depth: int, width: int) -> Path:
    """The settings of the shipped checkpoint, with a tower of that size."""
    shutil.copytree(SCENES, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= {"depth": depth, "hidden_size": width, "num_heads": 16}
    file.write_text(json.dumps(config))
    return folder


def ladder(path: Path, tower: str) -> Path:
    """Measured times of one tower alone, as `vitray bench encoder --arch` writes them."""
    path.write_text(json.dumps({"archs": {tower: json.loads(LADDER.read_text())["archs"][tower]}}))
    return path


def encoding_s(result: Result) -> tuple[str, ...]:
    """GPU-seconds of our tower and of vLLM's for the whole trace."""
    assert result.exit_code == 0, result.output
    found = re.search(r"([\d.]+) GPU-seconds by our encoder, ([\d.]+) by vLLM's tower", result.stderr)
    assert found is not None
    return found.groups()


def test_few_small_pictures_are_not_split(small: Path) -> None:
    result = plan(small)
    assert result.exit_code == 0, result.output
    (application,) = yaml.safe_load(result.stdout)["applications"]
    assert application["args"]["encoder"] == {"implementation": "none"}
    assert [deployment["name"] for deployment in application["deployments"]] == ["Ingress", "LLM"]
    assert "Do not split" in result.stderr
    for word in ("measured: ladder_h200.json\n", "assumed: hop of 14 ms"):
        assert word in result.stderr


def test_a_split_is_printed_as_a_configuration_that_the_check_takes(pages: Path, tmp_path: Path) -> None:
    """Pictures stop answers of a GPU that encodes, which is not allowed here; so only encoders apart are left."""
    result = plan(pages, "--slo-stall", "0.05")
    assert result.exit_code == 0, result.output
    assert "Split: " in result.stderr
    assert re.search(r"stop answers for [1-9][\d.]+ ms, over --slo-stall", result.stderr)
    file = tmp_path / "printed.yaml"
    file.write_text(result.stdout)
    checked = CliRunner().invoke(cli.main, ["check-config", str(file)])
    assert (checked.exit_code, checked.output) == (0, f"{file}: no mistakes found\n")
    (application,) = yaml.safe_load(result.stdout)["applications"]
    args = AppConfig.model_validate(application["args"])
    assert (args.model, args.encoder_replica.num_gpus, args.llm.num_gpus) == (MODEL, 1, 1)
    assert {d["name"]: d["num_replicas"] for d in application["deployments"]}["Encoder"] >= 1


def test_encoders_pay_where_another_language_model_would_cost_more(pages: Path) -> None:
    """Prefill keeps a replica of 2 GPUs busy for 85 % of its time; half of vLLM's tower is too much on top of it."""
    speeds = ("--prefill-tokens-per-s", "13200", "--decode-tokens-per-s", "30000", "--llm-gpus", "2")
    result = plan(pages, "--slo", "5", speeds=speeds)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stderr.splitlines() if line}
    assert (rows["aggregated"][1], rows["shared"][1], rows["split"][1]) == ("4", "none:", "3")
    assert "Split: 1 encoder(s) to 1 language model(s), 3 GPUs in all; vLLM alone takes 4 GPUs, 1 more" in result.stderr
    assert "tensor_parallel_size: 2" in result.stdout


@pytest.mark.parametrize(
    ("layout", "llm_gpus"),
    [
        (Layout(Placement.SHARED, 3, 3), 1),
        (Layout(Placement.SPLIT, 2, 5), 1),
        (Layout(Placement.SPLIT, 1, 2), 4),
        (Layout(Placement.AGGREGATED, 0, 2, 5), 2),
    ],
)
def test_every_configuration_is_one(layout: Layout, llm_gpus: int, tmp_path: Path) -> None:
    file = tmp_path / "printed.yaml"
    file.write_text(configuration.serve_config(MODEL, layout, llm_gpus=llm_gpus))
    read = config_check.read_config(file)
    assert config_check.problems(read) == []
    ((_, application),) = config_check.our_applications(read)
    args = AppConfig.model_validate(application["args"])
    assert args.llm.engine_args.get("tensor_parallel_size", 1) == llm_gpus
    if layout.placement is Placement.AGGREGATED:
        assert (args.encoder.implementation, args.encoder_replica.decode_workers) == ("none", 3)
        return
    assert (args.encoder_replica.num_gpus, args.llm.num_gpus) == (
        (0.2, 0.8) if layout.placement is Placement.SHARED else (1, llm_gpus)
    )


def test_processes_that_read_requests_are_printed() -> None:
    printed = yaml.safe_load(
        configuration.serve_config(MODEL, Layout(Placement.SPLIT, 1, 2, cpu_processes=4), llm_gpus=1)
    )
    assert printed["applications"][0]["deployments"][0] == {"name": "Ingress", "num_replicas": 4}


def test_the_speeds_of_the_language_model_are_asked_for(small: Path) -> None:
    result = plan(small, speeds=())
    assert result.exit_code == 2
    assert "--prefill-tokens-per-s" in result.stderr
    assert result.stdout == ""


def test_given_overheads_take_the_place_of_the_included_ones(small: Path) -> None:
    assert "assumed: hop of 5 ms" in plan(small, "--hop-ms", "5").stderr
    slow = plan(small, "--reading-ms", "0", "--vllm-reading-ms", "40000")
    assert "take a CPU 0 ms to read, one of vLLM's 40000;" in slow.stderr
    assert "Do not split" not in slow.stderr, "2 s of reading for 49 tokens are past --slo"


def test_one_file_of_the_ladder_has_the_times_of_both_towers(pages: Path, tmp_path: Path) -> None:
    own = plan(pages, "--costs", str(ladder(tmp_path / "mine.json", "qwen3_vl")))
    assert encoding_s(own) == encoding_s(plan(pages))
    assert "measured: mine.json\n" in own.stderr
    another = plan(pages, "--costs", str(ladder(tmp_path / "other.json", "qwen2_5_vl")))
    assert (another.exit_code, another.stdout) == (1, "")
    assert "--costs: other.json holds no measured times as expected: " in another.stderr
    assert "no tower 'qwen3_vl'; it has qwen2_5_vl" in another.stderr


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"archs": {"qwen3_vl": [{"tokens": 49}]}}', '{"archs": {"qwen3_vl": {"rows": [[]]}}}'),
        '{"archs": {"qwen3_vl": {"rows": [{"name": "a", "facts": "b"}]}}}',
    ],
)
def test_a_file_without_times_is_named(small: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    result = plan(small, "--costs", str(tmp_path / "mine.json"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--costs: mine.json holds no measured times as expected" in result.stderr


@pytest.mark.parametrize("tower", plan_command._MEASURED)
def test_every_tower_that_can_be_named_has_rules_and_times(pages: Path, tmp_path: Path, tower: str) -> None:
    """Of a model, the size of its tower decides, also with times of one's own."""
    assert set(plan_command._MEASURED) == set(traces.RULES)
    named = encoding_s(plan_for(pages, MODEL, "--arch", tower))
    if tower != "qwen2_5_vl":
        model = checkpoint(tmp_path / "model", *plan_command._MEASURED[tower])
        mine = ladder(tmp_path / "mine.json", tower)
        assert encoding_s(plan_for(pages, model)) == encoding_s(plan_for(pages, model, "--costs", str(mine)))
    assert all(float(seconds) > 0 for seconds in named)
    assert tower == "qwen3_vl" or named != encoding_s(plan(pages))


@pytest.mark.parametrize(
    "option",
    [
        *("--slo", "--slo-share", "--slo-stall", "--prefill-tokens-per-s", "--decode-tokens-per-s", "--speed"),
        *("--hop-ms", "--reading-ms", "--vllm-reading-ms"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_number_that_is_none_is_refused(small: Path, option: str, value: str) -> None:
    result = plan(small, option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert option in result.stderr


def test_what_cannot_be_kept_is_said(small: Path) -> None:
    result = plan(small, "--slo", "0.001", "--max-gpus", "3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no way keeps 0.001 s" in result.stderr


def test_a_tower_that_nobody_measured_is_refused(small: Path) -> None:
    """The small model that is shipped has one. A file of one's own has no times of it either."""
    for costs in ((), ("--costs", str(LADDER))):
        result = plan_for(small, SCENES, *costs)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "6 layers of 192; there are measured times of qwen3_vl (27 of 1152), " in result.stderr
        assert "--arch qwen3_vl|qwen3_vl_2b|qwen2_5_vl" in result.stderr


def test_a_picture_seen_before_is_encoded_once(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    picture = {"id": 7, "w": 448, "h": 448}
    nameless = {"w": 448, "h": 448}
    lines = [
        {"t": 5, "images": [picture, nameless], "prompt_tokens": 10, "output_tokens": 1},
        {"t": 9, "images": [picture, nameless], "prompt_tokens": 10, "output_tokens": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_requests(file, RULES)
    assert (len(first.images), len(second.images)) == (2, 1)
    assert first.num_tokens == second.num_tokens == 10 + 2 * 196


def test_a_video_costs_what_serving_it_costs(tmp_path: Path) -> None:
    """The chunks that are planned from its header, once for equal `id`s; all of its tokens are in every prompt."""
    file = Clip(50, Fraction(25), 320, 240).encode()
    header = read_header(file)
    planned = VideoPlan.make(header, VIDEO_RULES, VideoBounds())
    video = {"id": 1, "w": 320, "h": 240, "frames": header.num_frames, "seconds": header.duration_s}
    lines = [
        {"t": at, "images": [{"id": 1, "w": 448, "h": 448}], "videos": [video], "prompt_tokens": 10, "output_tokens": 1}
        for at in (5, 9)
    ]
    trace_file = tmp_path / "t.jsonl"
    trace_file.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_requests(trace_file, SCENES_RULES, VIDEO_RULES)
    image, *chunks = first.images
    assert [chunk.num_tokens for chunk in chunks] == [chunk.num_tokens for chunk in planned.chunks]
    assert second.images == ()
    assert first.num_tokens == second.num_tokens == 10 + image.num_tokens + planned.num_tokens


def test_videos_are_planned_by_the_models_own_rules(tmp_path: Path) -> None:
    file, model = tmp_path / "t.jsonl", checkpoint(tmp_path / "model", 24, 1024)
    video = {"w": 1280, "h": 720, "frames": 300, "seconds": 10}
    line = {"images": [], "videos": [video], "prompt_tokens": 10, "output_tokens": 10}
    file.write_text("\n".join(json.dumps(line | {"t": at}) for at in range(20)))
    result = plan_for(file, model)
    assert result.exit_code == 0, result.output
    chunks = len(
        VideoPlan.make(VideoHeader("mp4", "", 1280, 720, 300, 300, 30.0, 10.0), VIDEO_RULES, VideoBounds()).chunks
    )
    assert f"{20 * chunks} pictures and chunks of videos" in result.stderr
    refused = plan_for(file, model, "--arch", "qwen3_vl_2b")
    assert refused.exit_code == 1
    assert "leave --arch out" in refused.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 0}, "0 frames"),
        ({"seconds": 0}, "0.0 seconds"),
        ({"seconds": 601}, "601"),
        ({"w": 4000, "h": 4000}, "the limit is 2304000"),
        ({"w": None}, "line 1"),
    ],
)
def test_a_video_that_serving_would_refuse_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "t.jsonl"
    video = {"w": 1280, "h": 720, "frames": 300, "seconds": 10} | change
    file.write_text(json.dumps({"t": 1, "images": [], "videos": [video], "prompt_tokens": 1, "output_tokens": 1}))
    with pytest.raises(TraceError, match=message):
        read_requests(file, SCENES_RULES, VIDEO_RULES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t": "soon"}, "line 1"),
        ({"t": 1e999}, "t is inf"),
        ({"output_tokens": 0}, "output_tokens 0"),
        ({"images": 3}, "line 1"),
        ({"images": [[300, 200]]}, "line 1"),
        ({"images": [{"w": 0, "h": 200}]}, "line 1"),
        ({"images": [{"w": float("inf"), "h": 200}]}, "line 1"),
        ({}, "two|2 with different times"),
    ],
)
def test_what_is_no_trace_of_requests_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"t": 1, "images": [], "prompt_tokens": 1, "output_tokens": 1} | change))
    with pytest.raises(TraceError, match=message):
        read_requests(file, RULES)
    result = plan(file)
    assert (result.exit_code, result.stdout) == (1, "")


def vllms_times(tower: str) -> list[tuple[ImageCost, float]]:
    """Each shape as one image, with the time of the fastest mode of vLLM's tower."""
    found = json.loads(LADDER.read_text())["archs"][tower]
    modes = [row["cells"] for row in found["rows"] if row["name"].startswith("vllm ")]
    return [
        (ImageCost(shape["tokens"], shape["work"]), min(cells[shape["name"]]["ms"] for cells in modes))
        for shape in found["shapes"]
    ]


@pytest.mark.parametrize("tower", sorted(traces.RULES))
def test_vllms_times_are_near_what_was_measured(tower: str) -> None:
    """The line of which the help speaks: eleven shapes, up to 13 % off."""
    costs = read_vllm_costs(LADDER, tower, work_ms=read_costs(LADDER, tower).work_ms)
    times = vllms_times(tower)
    assert len(times) == 11
    for image, ms in times:
        assert costs.batch_ms([image], None) == pytest.approx(ms, rel=0.1301)


def written_ladder(path: Path, fast_ms: Sequence[float]) -> Path:
    shapes = [{"name": n, "tokens": t, "work": w} for n, t, w in (("a", 100, 1.0), ("b", 200, 1.0), ("c", 400, 2.0))]
    slow = {"name": "vllm launched eager", "cells": {"a": {"ms": 9.0}, "b": {"ms": 9.0}, "c": {"ms": 9.5}}}
    cells = {name: {"ms": ms} for name, ms in zip("abc", fast_ms, strict=False)}
    fast = {"name": "vllm launched graphs", "cells": cells}
    fp8 = {"name": "vllm-fp8 launched graphs", "cells": {"a": {"ms": 0.1}}}
    rows = [{"name": "eager"}, slow, fast, fp8]
    path.write_text(json.dumps({"archs": {"qwen3_vl": {"shapes": shapes, "rows": rows}}}))
    return path


def test_vllms_times_are_a_line_through_each_shapes_fastest(tmp_path: Path) -> None:
    file = written_ladder(tmp_path / "mine.json", [2.25, 3.25, 5.5])
    costs = read_vllm_costs(file, "qwen3_vl", work_ms=0.25)
    assert costs.budgets == ()
    assert costs.work_ms == 0.25
    assert [costs.eager_base_ms(tokens) for tokens in (1, 100, 60_000)] == pytest.approx([1.01, 2.0, 601.0])
    with pytest.raises(ValueError, match="it has qwen3_vl"):
        read_vllm_costs(file, "qwen2_5_vl", work_ms=0.25)


def test_times_of_vllm_without_a_line_are_refused(tmp_path: Path) -> None:
    falling = written_ladder(tmp_path / "falling.json", [8.0, 5.0, 1.0])
    with pytest.raises(ValueError, match="both must be positive"):
        read_vllm_costs(falling, "qwen3_vl", work_ms=0.0)
    few = json.loads(falling.read_text())
    del few["archs"]["qwen3_vl"]["shapes"][0]
    (tmp_path / "few.json").write_text(json.dumps(few))
    with pytest.raises(ValueError, match="for 2 shapes, not at least 3"):
        read_vllm_costs(tmp_path / "few.json", "qwen3_vl", work_ms=0.0)
