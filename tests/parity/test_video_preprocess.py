"""Grids, sampled timestamps and patches of videos against transformers' video processors, bit for bit.

The processor of transformers is the one that a checkpoint's own settings load (AutoVideoProcessor).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoVideoProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as resize_qwen2
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as resize_qwen3

from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.checkpoint.vision_config import Architecture
from encoder.images.decoded import Decoded
from encoder.images.size import num_tokens
from encoder.pixels.preprocess import patchify, resize
from encoder.video.bounds import VideoError
from encoder.video.sampling import SampledFrames
from encoder.video.size import plan_chunks, video_grid

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
QWEN2 = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP}
QWEN3 = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, **HALF}
SETTINGS: dict[str, tuple[Architecture, dict[str, Any], dict[str, Any]]] = {
    # Images' settings, then those of videos; a checkpoint without the latter uses the former for both.
    "qwen2_5_vl": ("qwen2_5_vl", {**QWEN2, "min_pixels": 3136, "max_pixels": 100_352}, {}),
    "qwen2_5_vl, capped": (
        "qwen2_5_vl",
        {**QWEN2, "min_pixels": 3136, "max_pixels": 100_352},
        {**QWEN2, "min_pixels": 3136, "max_pixels": 100_352, "cap_pixels_per_frame": True, "max_video_tokens": 100},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {**QWEN3, "size": {"shortest_edge": 65536, "longest_edge": 524288}},
        {**QWEN3, "size": {"shortest_edge": 4096, "longest_edge": 200_000}},
    ),
    "qwen3_vl, capped": (
        "qwen3_vl",
        {**QWEN3, "size": {"shortest_edge": 65536, "longest_edge": 524288}},
        {
            **QWEN3,
            "size": {"shortest_edge": 4096, "longest_edge": 400_000},
            "cap_pixels_per_frame": True,
            "max_video_tokens": 20,
        },
    ),
}
CLASSES = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}


@pytest.fixture(params=SETTINGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Architecture]:
    architecture, images, videos = SETTINGS[request.param]
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "video_processor_type": CLASSES[architecture]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**kinds, **images}))
    if videos:
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**kinds, **videos}))
    return tmp_path, architecture


def rules_of(checkpoint: tuple[Path, Architecture]) -> VideoRules:
    path, architecture = checkpoint
    return VideoRules.from_checkpoint(path, architecture, ImageRules.from_checkpoint(path))


def frames_of(num_frames: int, height: int, width: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([num_frames, height, width])
    frames = rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    frames[:, :, ::5] = 255
    return frames


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(2, 64, 96), (5, 63, 97), (8, 20, 30), (4, 200, 333), (7, 9, 300), (12, 128, 128), (3, 300, 40)],
)
def test_patches_and_grids(checkpoint: tuple[Path, Architecture], num_frames: int, height: int, width: int) -> None:
    rules = rules_of(checkpoint)
    frames = frames_of(num_frames, height, width)
    expected = AutoVideoProcessor.from_pretrained(checkpoint[0])(
        videos=[frames], do_sample_frames=False, return_tensors="pt"
    )
    grid = video_grid(width, height, num_frames, rules)
    assert list(grid) == expected["video_grid_thw"][0].tolist()
    patches = patchify(torch.from_numpy(resize(Decoded(frames, grid), rules.frames).values), rules.frames)
    assert torch.equal(patches, expected["pixel_values_videos"])
    chunks = plan_chunks(grid, num_frames, 2, rules.frames)
    parts = [frames[chunk.first_frame : chunk.first_frame + chunk.num_frames] for chunk in chunks]
    made = [resize(Decoded(part, chunk.grid_thw), rules.frames) for part, chunk in zip(parts, chunks, strict=True)]
    assert torch.equal(torch.cat([patchify(torch.from_numpy(each.values), rules.frames) for each in made]), patches)
    assert sum(chunk.num_tokens for chunk in chunks) == num_tokens(grid, rules.frames.merge_size)


def test_sizes_by_the_processors_own_rules(checkpoint: tuple[Path, Architecture]) -> None:
    rules = rules_of(checkpoint)
    if rules.cap_pixels_per_frame:
        pytest.skip("the rule takes the bound as an argument")
    draw = random.Random(4)
    refused = 0
    for _ in range(4000):
        width, height, count = draw.randint(1, 2500), draw.randint(1, 2500), draw.randint(1, 60)
        bounds = (rules.frames.factor, rules.frames.min_pixels, rules.frames.max_pixels)
        try:
            if rules.loader == "qwen2_vl":
                expected = resize_qwen2(height, width, *bounds)
            else:
                expected = resize_qwen3(count, height, width, 2, *bounds)
        except ValueError:
            refused += 1
            with pytest.raises(VideoError):
                video_grid(width, height, count, rules)
            continue
        patch = rules.frames.patch_size
        assert video_grid(width, height, count, rules) == ((count + 1) // 2, expected[0] // patch, expected[1] // patch)
    assert refused


def test_rules_that_cannot_be_shared_with_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**QWEN3, "size": {}, "min_pixels": 1024, "max_pixels": 4096})
    )
    images = ImageRules.from_checkpoint(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**QWEN3, "patch_size": 14}))
    with pytest.raises(ValueError, match="patch_size is 14 for videos and 16 for images"):
        VideoRules.from_checkpoint(tmp_path, "qwen3_vl", images)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": "Other"}))
    with pytest.raises(ValueError, match="video_processor_type is 'Other'; supported: Qwen3VLVideoProcessor"):
        VideoRules.from_checkpoint(tmp_path, "qwen3_vl", images)


def test_timestamps() -> None:
    frames = SampledFrames((0, 10, 20), 30, 10.0, 3.0)
    assert frames.timestamps(2) == [0.5, 2.0], "the last frame fills the last patch"
    assert frames.seconds_per_grid(2) == 2.0
