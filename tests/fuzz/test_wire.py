"""Embeddings with headers at random: each is what the language model takes, or a WireError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.common.messages import EncodedImage, EncodeTimings, WireError
from tests.fuzz.shares import IN_PROCESS

WIDTH = 8
SHAPE = (6, WIDTH)
TIMINGS = EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=False)
DTYPES = ("float32", "uint16", "float16", "int8", "uint8", "int64", "complex64", "bool", "S4", "object", ">f4", ">u2")


@st.composite
def embeddings(draw: st.DrawFn) -> EncodedImage:
    shape = draw(
        st.one_of(
            st.just(SHAPE),
            st.tuples(st.integers(0, 40), st.sampled_from([WIDTH, WIDTH - 1, WIDTH + 1, 0])),
            st.lists(st.integers(0, 4), max_size=4).map(tuple),
        )
    )
    bits = np.zeros(shape, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        bits = bits[::-1] if bits.ndim else bits
    dtype = draw(st.one_of(st.sampled_from(["float32", "bfloat16", "float16", "torch.float32"]), st.text(max_size=8)))
    return EncodedImage("0" * 64, dtype, bits, TIMINGS)


def check(image: EncodedImage) -> None:
    try:
        image.check(SHAPE)
    except WireError:
        return
    tokens = image.unpack()
    assert tokens.shape == SHAPE
    assert str(tokens.dtype) == f"torch.{image.dtype}"
    assert tokens.dtype in (torch.float32, torch.bfloat16)


def test_headers_and_bits(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["headers and bits"])
    @given(embeddings())
    @example(EncodedImage("0" * 64, "float32", np.zeros((6, WIDTH), np.float32)[:, ::-1], TIMINGS))
    def fuzz(image: EncodedImage) -> None:
        check(image)

    fuzz()


def test_headers_that_are_no_numbers_at_all(fuzzing: Callable[[float], settings]) -> None:
    """What a process with another version of this code might send."""
    value = st.one_of(st.none(), st.text(max_size=3), st.floats(), st.booleans(), st.binary(max_size=3), st.integers())

    @fuzzing(IN_PROCESS["headers that are no numbers"])
    @given(
        st.one_of(value, st.sampled_from(["float32", "bfloat16"])),
        st.one_of(value, st.just(np.zeros((6, WIDTH)))),
    )
    @example("float32", [[0.0]])
    @example([], np.zeros((6, WIDTH), np.float32))
    def fuzz(dtype: Any, bits: Any) -> None:
        check(EncodedImage("0" * 64, dtype, bits, TIMINGS))

    fuzz()
