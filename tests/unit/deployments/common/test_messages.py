"""Embeddings on the way: bits unchanged, and every header that disagrees with its bytes refused."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.common.messages import EncodedImage, EncodeTimings, WireError

TIMINGS = EncodeTimings(preprocess_ms=1.0, queue_ms=2.0, encode_ms=3.0, ready_at_s=4.0, cached=False)
DIGEST = "d" * 64
WIDTH, MERGE = 6, 2


def embedding(grid: tuple[int, int, int] = (1, 4, 6), *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    t, h, w = grid
    rows = t * h * w // MERGE**2
    return torch.arange(rows * WIDTH).reshape(rows, WIDTH).to(dtype) / 7


def packed(grid: tuple[int, int, int] = (1, 4, 6), *, dtype: torch.dtype = torch.bfloat16) -> EncodedImage:
    return EncodedImage.pack(embedding(grid, dtype=dtype), grid, DIGEST, TIMINGS)


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=6, max_size=36).filter(lambda bits: len(bits) % 6 == 0),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_bit_pattern_travels(bits: list[int], dtype: torch.dtype) -> None:
    """Infinities and every NaN among them: what travels are bits."""
    values = torch.from_numpy(np.array(bits, dtype=np.uint16).reshape(-1, WIDTH)).view(torch.bfloat16)
    tokens = values if dtype is torch.bfloat16 else values.float()
    image = EncodedImage.pack(tokens, (1, 2, 2 * len(tokens)), DIGEST, TIMINGS)
    arrived = pickle.loads(pickle.dumps(image, protocol=5)).unpack(width=WIDTH, merge_size=MERGE)
    integer = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(integer), tokens.view(integer))


def test_num_bytes_is_what_the_cache_is_charged() -> None:
    assert packed(dtype=torch.bfloat16).num_bytes == 6 * WIDTH * 2
    assert packed(dtype=torch.float32).num_bytes == 6 * WIDTH * 4


def test_a_view_of_a_larger_tensor_is_packed_as_itself() -> None:
    whole = torch.arange(6 * 2 * WIDTH, dtype=torch.float32).reshape(6, 2 * WIDTH)
    image = EncodedImage.pack(whole[:, ::2], (1, 4, 6), DIGEST, TIMINGS)
    assert torch.equal(image.unpack(width=WIDTH, merge_size=MERGE), whole[:, ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_only_memory_is_taken_without_a_copy_and_without_a_warning(dtype: torch.dtype) -> None:
    """The object store's memory is read-only; a copy would cost tens of megabytes an image."""
    image = packed(dtype=dtype)
    image.bits.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = image.unpack(width=WIDTH, merge_size=MERGE)
    assert tokens.data_ptr() == image.bits.ctypes.data
    assert torch.equal(tokens, embedding(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_cannot_be_packed(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=str(dtype).removeprefix("torch.")):
        packed(dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "float16"}, r"'float16' is unknown; known: bfloat16, float32"),
        ({"dtype": "float32"}, r"bits are uint16, expected float32 for float32"),
        ({"bits": np.zeros((6, WIDTH), np.int16)}, r"bits are int16, expected uint16 for bfloat16"),
        ({"bits": np.zeros((6, WIDTH), np.float32)}, r"bits are float32, expected uint16 for bfloat16"),
        ({"bits": np.zeros((6, WIDTH), ">u2")}, r"bits are >u2, expected uint16 for bfloat16"),
        ({"bits": np.zeros((6, WIDTH + 1), np.uint16)}, r"\(6, 7\) does not fit .* expected \(6, 6\)"),
        ({"bits": np.zeros((5, WIDTH), np.uint16)}, r"\(5, 6\) does not fit .* expected \(6, 6\)"),
        ({"bits": np.zeros(6 * WIDTH, np.uint16)}, r"\(36,\) does not fit"),
        ({"bits": np.zeros((1, 6, WIDTH), np.uint16)}, r"\(1, 6, 6\) does not fit"),
        ({"grid_thw": (1, 6, 6)}, r"expected \(9, 6\)"),
        ({"grid_thw": (1, 3, 8)}, r"\(1, 3, 8\) is not positive multiples of the merge size 2"),
        ({"grid_thw": (1, 8, 3)}, r"\(1, 8, 3\) is not positive multiples"),
        ({"grid_thw": (0, 4, 6)}, r"\(0, 4, 6\) is not positive"),
        ({"grid_thw": (-1, -4, 6)}, r"\(-1, -4, 6\) is not positive"),
        ({"grid_thw": (1, -4, -6)}, r"\(1, -4, -6\) is not positive"),
    ],
)
def test_every_mismatch_is_refused_with_both_values(changes: dict[str, Any], told: str) -> None:
    """A wrong width would kill vLLM's engine, so nothing that does not fit may pass."""
    image = dataclasses.replace(packed(), **changes)
    with pytest.raises(WireError, match=told):
        image.unpack(width=WIDTH, merge_size=MERGE)


def test_the_width_and_merge_size_are_the_language_models() -> None:
    with pytest.raises(WireError, match=r"expected \(6, 12\)"):
        packed().unpack(width=2 * WIDTH, merge_size=MERGE)
    with pytest.raises(WireError, match="multiples of the merge size 4"):
        packed().unpack(width=WIDTH, merge_size=4)


def test_images_swapped_in_shape_are_told_apart() -> None:
    """4x6 and 6x4 have equally many tokens: only the grid tells them apart, and it travels along."""
    assert packed((1, 4, 6)).bits.shape == packed((1, 6, 4)).bits.shape
    assert packed((1, 4, 6)).grid_thw != packed((1, 6, 4)).grid_thw
