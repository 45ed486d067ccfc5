"""`decode`, `resize` and `patchify` give the patches and grids of transformers' image processor for a checkpoint.

Equality is bit for bit, no tolerance: both resize bytes in the same integer arithmetic and normalise in the same
float32 operations. The processor of transformers is the one that a checkpoint's own settings load (AutoImageProcessor).
"""

from __future__ import annotations

import io
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from encoder.images.decoded import decode
from encoder.images.load import load_rgb
from encoder.images.size import ImageError, ImageRules, PixelBounds, image_grid, num_tokens, read_header, resized_size
from encoder.pixels.preprocess import patchify, resize

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# Qwen2.5-VL's and Qwen3-VL's settings with a maximum that fits a test machine, and some that differ in every fact.
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 401408, "patch_size": 14, "temporal_patch_size": 2, **CLIP},
    "qwen3_vl": {"size": {"shortest_edge": 65536, "longest_edge": 524288}, "patch_size": 16, **HALF},
    "other": {
        "size": {"shortest_edge": 900, "longest_edge": 90000},
        "patch_size": 5,
        "merge_size": 3,
        "temporal_patch_size": 3,
        "rescale_factor": 0.01,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.9, 0.7, 0.5],
    },
}


@pytest.fixture(params=SETTINGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, **SETTINGS[request.param]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    return tmp_path


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise and stripes of full contrast, so that overshoots of the bicubic kernel are clipped too."""
    rng = np.random.default_rng([width, height, seed])
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    noise[:, ::5] = 255
    noise[::3] = np.where(rng.random((len(noise[::3]), width, 3)) < 0.5, 0, 255)
    return Image.fromarray(noise)


def by_transformers(
    checkpoint: Path, images: list[Image.Image], **bounds: int | None
) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    processor = AutoImageProcessor.from_pretrained(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # on min_pixels and max_pixels in a call
        output = processor(images=images, return_tensors="pt", **{k: v for k, v in bounds.items() if v})
    return output["pixel_values"], [tuple(grid) for grid in output["image_grid_thw"].tolist()]


def ours(
    checkpoint: Path, image: Image.Image, bounds: PixelBounds | None = None
) -> tuple[torch.Tensor, tuple[int, ...]]:
    rules = ImageRules.from_checkpoint(checkpoint)
    pixels = resize(decode(image, rules, bounds), rules)
    assert pixels.values.dtype == np.uint8
    assert pixels.values.flags["C_CONTIGUOUS"]
    return patchify(torch.from_numpy(pixels.values), rules), pixels.grid_thw


SIZES = [
    (1, 1), (1, 3), (3, 1), (3, 3), (2, 150), (14, 14), (28, 28), (29, 27), (31, 97), (56, 56), (100, 100), (64, 64),
    (255, 257), (256, 256), (300, 200), (333, 77), (77, 333), (640, 480), (641, 479), (719, 721), (1000, 1500),
    (1500, 37), (37, 1500), (1999, 10), (1025, 1023), (2000, 1333),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_patches_and_grid(checkpoint: Path, size: tuple[int, int]) -> None:
    image = picture(*size)
    expected, grids = by_transformers(checkpoint, [image])
    patches, grid = ours(checkpoint, image)
    assert [grid] == grids
    assert patches.dtype == expected.dtype == torch.float32
    assert torch.equal(patches, expected)


def test_sizes_go_up_down_and_stay(checkpoint: Path) -> None:
    """The list above is of use only while it has images that are enlarged, reduced, and left as they are."""
    rules = ImageRules.from_checkpoint(checkpoint)
    changes = {np.sign(w * h - a * b) for w, h in SIZES for a, b in [resized_size(w, h, rules)]}
    assert changes >= {-1, 1}
    same = resized_size(320, 320, rules)
    image = picture(*same)
    assert resized_size(*same, rules) == same
    assert np.array_equal(resize(decode(image, rules), rules).values, np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("min_pixels", "max_pixels"),
    [
        (None, 40_000),
        (None, 2_000_000),
        (500_000, 2_000_000),
        (20_000, 60_000),
        (1, None),
        (None, 1),
        (1, 1),
        (90_000, 90_000),
    ],
)
@pytest.mark.parametrize("size", [(40, 30), (200, 150), (333, 512), (1100, 90), (1200, 900)])
def test_bounds_of_a_request(
    checkpoint: Path, size: tuple[int, int], min_pixels: int | None, max_pixels: int | None
) -> None:
    """As transformers' processor called with the same `min_pixels` and `max_pixels`, None being left out."""
    image = picture(*size)
    bounds = PixelBounds(min_pixels, max_pixels)
    expected, grids = by_transformers(checkpoint, [image], min_pixels=min_pixels, max_pixels=max_pixels)
    patches, grid = ours(checkpoint, image, bounds)
    assert [grid] == grids == [image_grid(*size, ImageRules.from_checkpoint(checkpoint), bounds)]
    assert torch.equal(patches, expected)


def test_an_image_does_not_depend_on_its_batch(checkpoint: Path) -> None:
    """transformers resizes equal sizes together; the rows of each image are those it has alone, here and there."""
    images = [picture(w, h, seed) for seed in range(2) for w, h in ((300, 200), (64, 90), (300, 200), (801, 600))]
    expected, grids = by_transformers(checkpoint, images)
    each = [ours(checkpoint, image) for image in images]
    assert [grid for _, grid in each] == grids
    assert torch.equal(torch.cat([patches for patches, _ in each]), expected)


def test_encoded_bytes(checkpoint: Path) -> None:
    """From a file with orientation and alpha to patches, with the grid known from the header alone."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = picture(300, 120).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    data = buffer.getvalue()
    rules = ImageRules.from_checkpoint(checkpoint)
    pixels = resize(decode(data, rules), rules)
    expected, grids = by_transformers(checkpoint, [load_rgb(data)])
    stated = read_header(data)
    assert (stated.width, stated.height) == (120, 300)
    assert [pixels.grid_thw] == grids == [image_grid(stated.width, stated.height, rules)]
    assert torch.equal(patchify(torch.from_numpy(pixels.values), rules), expected)


def test_limits_hold_for_both_kinds_of_image() -> None:
    image = picture(10, 10)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    for given in (image, buffer.getvalue()):
        with pytest.raises(ImageError, match="image has 10x10 = 100 pixels, the limit is 99"):
            decode(given, ImageRules(), max_pixels_decoded=99)
    with pytest.raises(ImageError, match=r"aspect ratio 201, the limit is 200"):
        decode(picture(201, 1), ImageRules())


def test_order_of_patches() -> None:
    """Worked out by hand: 2x4 patches of one pixel, merged two by two, two frames."""
    rules = ImageRules(patch_size=1, merge_size=2, rescale_factor=1.0, image_mean=(0, 0, 0), image_std=(1, 1, 1))
    values = torch.arange(24, dtype=torch.uint8).view(3, 2, 4)
    patches = patchify(values, rules)
    assert patches.shape == (8, 3 * 2)
    first_block, second_block = [0, 1, 4, 5], [2, 3, 6, 7]
    assert patches[:, 0].tolist() == patches[:, 1].tolist() == first_block + second_block
    assert patches[0].tolist() == [0, 0, 8, 8, 16, 16]


def test_patchify_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="pixels are 60x56; both sides must be multiples of 28"):
        patchify(torch.zeros(3, 56, 60, dtype=torch.uint8), ImageRules())


def test_sizes_by_the_processors_own_rule() -> None:
    """Its rounding, half to even included, over sizes at random and on the edges of the factor."""
    rng = random.Random(3)
    edges = [
        factor * n + d for factor in (28, 32) for n in (1, 2, 3, 17) for d in (-factor // 2, -1, 0, 1, factor // 2)
    ]
    sizes = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(4000)] + [(a, b) for a in edges for b in edges]
    for rules in (ImageRules(), ImageRules(patch_size=16, min_pixels=65536, max_pixels=16777216)):
        for width, height in sizes:
            if max(width, height) / min(width, height) > 200:
                with pytest.raises(ImageError):
                    resized_size(width, height, rules)
                continue
            expected = smart_resize(height, width, rules.factor, rules.min_pixels, rules.max_pixels)
            assert resized_size(width, height, rules) == expected[::-1]


def test_token_counts_are_the_processors(checkpoint: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(checkpoint)
    rules = ImageRules.from_checkpoint(checkpoint)
    for width, height in SIZES:
        patches = processor.get_number_of_image_patches(height, width)
        assert num_tokens(image_grid(width, height, rules), rules.merge_size) * rules.merge_size**2 == patches
