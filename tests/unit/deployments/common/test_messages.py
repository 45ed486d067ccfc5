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
WIDTH = 6


def embedding(*, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(6 * WIDTH).reshape(6, WIDTH).to(dtype) / 7


def packed(*, dtype: torch.dtype = torch.bfloat16) -> EncodedImage:
    return EncodedImage.pack(embedding(dtype=dtype), DIGEST, TIMINGS)


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=6, max_size=36).filter(lambda bits: len(bits) % 6 == 0),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_bit_pattern_travels(bits: list[int], dtype: torch.dtype) -> None:
    """Infinities and every NaN among them: what travels are bits."""
    values = torch.from_numpy(np.array(bits, dtype=np.uint16).reshape(-1, WIDTH)).view(torch.bfloat16)
    tokens = values if dtype is torch.bfloat16 else values.float()
    image = EncodedImage.pack(tokens, DIGEST, TIMINGS)
    arrived = pickle.loads(pickle.dumps(image, protocol=5)).unpack()
    integer = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(integer), tokens.view(integer))


def test_num_bytes_is_what_the_cache_is_charged() -> None:
    assert packed(dtype=torch.bfloat16).num_bytes == 6 * WIDTH * 2
    assert packed(dtype=torch.float32).num_bytes == 6 * WIDTH * 4


def test_a_view_of_a_larger_tensor_is_packed_as_itself() -> None:
    whole = torch.arange(6 * 2 * WIDTH, dtype=torch.float32).reshape(6, 2 * WIDTH)
    image = EncodedImage.pack(whole[:, ::2], DIGEST, TIMINGS)
    assert torch.equal(image.unpack(), whole[:, ::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_read_only_memory_is_taken_without_a_copy_and_without_a_warning(dtype: torch.dtype) -> None:
    """The object store's memory is read-only; a copy would cost tens of megabytes an image."""
    image = packed(dtype=dtype)
    image.bits.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = image.unpack()
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
        ({"bits": np.zeros((6, WIDTH + 1), np.uint16)}, r"\(6, 7\) is not the expected \(6, 6\)"),
        ({"bits": np.zeros((5, WIDTH), np.uint16)}, r"\(5, 6\) is not the expected \(6, 6\)"),
        ({"bits": np.zeros(6 * WIDTH, np.uint16)}, r"\(36,\) is not the expected"),
        ({"bits": np.zeros((1, 6, WIDTH), np.uint16)}, r"\(1, 6, 6\) is not the expected"),
        ({"bits": np.zeros((6, WIDTH), np.uint16)[:, ::-1]}, r"expected a contiguous array"),
    ],
)
def test_every_mismatch_is_refused_with_both_values(changes: dict[str, Any], told: str) -> None:
    """A wrong width would kill vLLM's engine, so nothing that does not fit may pass."""
    image = dataclasses.replace(packed(), **changes)
    with pytest.raises(WireError, match=told):
        image.check((6, WIDTH))


def test_the_shape_is_the_language_models() -> None:
    packed().check((6, WIDTH))
    for expected in ((6, 2 * WIDTH), (9, WIDTH)):
        for image in (packed(), packed().to_shared("server")):
            with pytest.raises(WireError, match=r"\(6, 6\) is not the expected"):
                image.check(expected)
