"""Bytes to patches where the device resizes: the same patches, bit for bit, as where the CPU does.

The sums are integers and the normalising is the same float32 division, so there is no tolerance; 2/255 would do.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.pixels import resize_weights
from encoder.pixels.layout import plan_pixels
from encoder.pixels.preprocess import patchify, resize
from encoder.pixels.resize_weights import Taps, taps
from tests.unit.encoder.interpreter import Interpreted
from tests.unit.encoder.pixels.filled import patches_of
from tests.unit.encoder.pixels.resized import resize_bytes

RULES = ImageRules(patch_size=16, image_mean=(0.5, 0.4, 0.3), image_std=(0.5, 0.3, 0.2))
OTHER = ImageRules(patch_size=5, merge_size=3, temporal_patch_size=3, rescale_factor=0.01)
# (height, width) of the file and the (rows, columns) of merge blocks it is resized to.
SIZES = [
    ((1, 1), (2, 2)), ((1, 200), (1, 6)), ((200, 1), (6, 1)), ((64, 96), (2, 3)), ((63, 97), (2, 3)),
    ((40, 30), (5, 4)), ((333, 77), (2, 1)), ((300, 500), (9, 16)), ((700, 500), (1, 1)), ((96, 33), (3, 2)),
    ((31, 96), (2, 3)),
]  # fmt: skip


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Noise with stripes of full contrast, so that overshoots of the kernel are clipped too."""
    rng = np.random.default_rng([height, width, seed])
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    noise[:, ::5] = 255
    noise[::3] = np.where(rng.random(noise[::3].shape) < 0.5, 0, 255)
    return noise


def by_torch(values: np.ndarray, height: int, width: int) -> torch.Tensor:
    return torch.nn.functional.interpolate(
        torch.from_numpy(values).permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True
    )[0]


SIDES = st.integers(1, 260)


@settings(deadline=None, max_examples=60)
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(["noise", "edges"]))
def test_resized_bytes_are_those_of_torch(height: int, width: int, to_height: int, to_width: int, kind: str) -> None:
    values = picture(height, width)
    if kind == "edges":
        values = np.where(values < 128, 0, 255).astype(np.uint8)
    resized = resize_bytes(torch.from_numpy(values).permute(2, 0, 1), to_height, to_width)
    assert torch.equal(resized, by_torch(values, to_height, to_width))


@pytest.mark.parametrize(
    ("size", "to"), [((1500, 700), (64, 32)), ((9, 900), (32, 3200)), ((1203, 1997), (1216, 1984))]
)
def test_large_images_too(size: tuple[int, int], to: tuple[int, int]) -> None:
    values = picture(*size)
    assert torch.equal(resize_bytes(torch.from_numpy(values).permute(2, 0, 1), *to), by_torch(values, *to))


@pytest.mark.parametrize("rules", [RULES, OTHER], ids=["16", "5"])
@pytest.mark.parametrize(("size", "blocks"), SIZES)
def test_patches_are_those_of_the_cpus_way(size: tuple[int, int], blocks: tuple[int, int], rules: ImageRules) -> None:
    values = picture(*size)
    grid = (1, blocks[0] * rules.merge_size, blocks[1] * rules.merge_size)
    expected = patchify(torch.from_numpy(resize(Decoded(values, grid), rules).values), rules)
    assert torch.equal(patches_of(torch.from_numpy(values), grid, rules), expected)
    narrow = patches_of(torch.from_numpy(values), grid, rules, dtype=torch.bfloat16)
    assert torch.equal(narrow, expected.to(torch.bfloat16))


@pytest.mark.parametrize("rules", [RULES, OTHER], ids=["16", "5"])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 6, 7])
def test_frames_of_a_video_are_those_of_the_cpus_way(num_frames: int, rules: ImageRules) -> None:
    """In pairs or threes; the last frame fills its temporal patch."""
    values = np.stack([picture(63, 97, seed) for seed in range(num_frames)])
    grid = (-(-num_frames // rules.temporal_patch_size), 2 * rules.merge_size, 3 * rules.merge_size)
    expected = patchify(torch.from_numpy(resize(Decoded(values, grid), rules).values), rules)
    assert torch.equal(patches_of(torch.from_numpy(values), grid, rules), expected)
    assert len(expected) == grid[0] * grid[1] * grid[2]


def test_out_is_written_in_place_and_its_shape_is_checked() -> None:
    values = torch.from_numpy(picture(40, 30))
    out = torch.zeros(4, 3 * 2 * 256)
    patches_of(values, (1, 2, 2), RULES, out=out)
    assert out.abs().sum() > 0
    with pytest.raises(ValueError, match=r"contiguous tensor of \(4, 1536\), not one of \(5, 1536\)"):
        patches_of(values, (1, 2, 2), RULES, out=torch.zeros(5, 1536))
    with pytest.raises(ValueError, match="contiguous"):
        patches_of(values, (1, 2, 2), RULES, out=torch.zeros(1536, 4).T)


def test_odd_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of the merge size"):
        plan_pixels([(1, 8, 8, False)], [(1, 3, 2)], RULES)
    with pytest.raises(ValueError, match=r"grid of 1 frames is \(2, 2, 2\); it must be \(1, h, w\)"):
        plan_pixels([(1, 8, 8, False)], [(2, 2, 2)], RULES)


def test_weights_sum_to_one_and_stay_within_16_bits() -> None:
    for num_in, num_out in ((5, 7), (1, 9), (999, 32), (4000, 1008), (32, 4000), (12, 12), (65_000, 32)):
        found = taps(num_in, num_out)
        assert abs(found.weights).max() < 2**15
        sums = found.weights.sum(1) / 2**found.precision
        assert np.allclose(sums, 1, atol=found.weights.shape[1] * 2.0**-found.precision)
        last = found.first + (found.weights != 0).cumsum(1).argmax(1)
        assert found.first.min() >= 0
        assert last.max() < num_in
        # What the device sums in 32 bits.
        assert 255 * abs(found.weights.astype(np.int64)).sum(1).max() + 2**found.precision < 2**31


def test_remembered_weights_keep_within_their_bound() -> None:
    longest = resize_weights._LONGEST_REMEMBERED
    resize_weights._taps.cache_clear()
    assert taps(longest, 60) is taps(longest, 60)
    assert taps(longest + 1, 60) is not taps(longest + 1, 60)
    assert taps(60, longest + 1) is not taps(60, longest + 1)
    largest = max((taps(longest, out) for out in (1, 60, longest - 1, longest)), key=num_bytes)
    assert num_bytes(largest) * resize_weights._MAX_REMEMBERED < 26e6
    assert resize_weights._taps.cache_info().maxsize == resize_weights._MAX_REMEMBERED


def num_bytes(found: Taps) -> int:
    return found.first.nbytes + found.weights.nbytes


def test_a_plan_places_images_apart_and_weights_once() -> None:
    shapes = [(1, 64, 50, False), (1, 64, 64, True), (1, 64, 50, False), (1, 10, 64, False)]
    grids = [(1, 4, 4), (1, 4, 4), (1, 4, 4), (1, 2, 4)]
    plan = plan_pixels(shapes, grids, RULES)
    ends = [image.offset + 3 * image.height * image.width for image in plan.placed]
    assert all(end <= later.offset for end, later in zip(ends, plan.placed[1:], strict=False))
    assert ends[-1] < plan.buffer_bytes
    assert plan.num_patches == 56
    assert len(plan.rows_table) == 2, "the rows of two images are resized"
    assert (plan.max_rows, plan.max_width, plan.max_patches) == (64, 64, 16)
    needed = [taps(50, 64), taps(64, 64), taps(10, 32)]
    assert plan.num_weights == sum(part.first.size + part.weights.size for part in needed)


# What the interpreter does in seconds: it runs the kernels' blocks one by one in Python.
SMALL = [SIZES[i] for i in (0, 1, 2, 4, 5, 10)]

SCRIPT = """
import numpy as np
import torch

from encoder.pixels.device import fill_patches_torch, fill_patches_triton
from encoder.pixels.layout import plan_pixels
from tests.unit.encoder.pixels.test_device import OTHER, RULES, SMALL, picture

for rules in (RULES, OTHER):
    shapes, grids, pictures = [], [], []
    for number, ((height, width), (h, w)) in enumerate(SMALL):
        planar = number % 3 == 2
        if planar:  # as the CPU has resized it
            height, width = h * rules.factor, w * rules.factor
        values = picture(height, width)
        pictures.append(values.transpose(2, 0, 1) if planar else values)
        shapes.append((1, height, width, planar))
        grids.append((1, h * rules.merge_size, w * rules.merge_size))
    frames = np.stack([picture(20, 30, seed) for seed in range(3)])  # the last one fills its temporal patch
    pictures.append(frames)
    shapes.append((*frames.shape[:3], False))
    grids.append((-(-3 // rules.temporal_patch_size), rules.merge_size, 2 * rules.merge_size))
    plan = plan_pixels(shapes, grids, rules)
    buffer = torch.full((plan.buffer_bytes,), 7, dtype=torch.uint8)
    for image, values in zip(plan.placed, pictures, strict=True):
        buffer[image.offset : image.offset + values.size] = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
    width = 3 * rules.temporal_patch_size * rules.patch_size**2
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = (torch.full((plan.num_patches, width), float("nan"), dtype=dtype) for _ in range(2))
        fill_patches_torch(plan, buffer, rules, expected)
        fill_patches_triton(plan, buffer, torch.from_numpy(plan.control), rules, found)
        # The interpreter cuts to bfloat16 where a GPU rounds: one step.
        assert torch.allclose(found, expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=0)
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_give_the_same(interpreted: Interpreted) -> None:
    """In Triton's interpreter, all sizes as one batch, decoded images and resized ones mixed."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    assert interpreted(SCRIPT) == "equal"


@pytest.mark.parametrize("num_images", range(1, 6))
@pytest.mark.parametrize("num_frames", [1, 3])
def test_tables_begin_where_no_kernel_is_compiled_once_more(num_images: int, num_frames: int) -> None:
    """Triton compiles a kernel for addresses that are multiples of 16, and once more for others: half a second in which
    images wait."""
    grid = (-(-num_frames // RULES.temporal_patch_size), 4, 6)
    plan = plan_pixels([(num_frames, 50, 70, False)] * num_images, [grid] * num_images, RULES)
    rows, patches = plan.rows_table.nbytes, plan.patch_table.nbytes
    assert rows > 0
    assert (rows % 16, (rows + patches) % 16, plan.buffer_bytes % 16) == (0, 0, 0)
