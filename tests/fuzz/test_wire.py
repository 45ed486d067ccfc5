"""Tickets of embeddings at random: each is what the language model takes, or a WireError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployments.common.messages import NOT_STORED, EncodeTimings, SharedEmbedding, WireError
from tests.fuzz.shares import IN_PROCESS

WIDTH = 8
SHAPE = (6, WIDTH)
TIMINGS = EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=False)
SHAPES = st.one_of(
    st.just(SHAPE),
    st.tuples(st.integers(0, 40), st.sampled_from([WIDTH, WIDTH - 1, WIDTH + 1, 0])),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)
DTYPES = st.one_of(st.sampled_from(["float32", "bfloat16", "float16", "torch.float32"]), st.text(max_size=8))


def check(dtype: Any, shape: Any) -> None:
    image = SharedEmbedding("0" * 64, dtype, shape, TIMINGS, NOT_STORED)
    try:
        image.check(SHAPE)
    except WireError:
        return
    assert image.shape == SHAPE
    assert image.dtype in ("float32", "bfloat16")


def test_dtypes_and_shapes(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["headers and bits"])
    @given(DTYPES, SHAPES)
    @example("float32", SHAPE)
    def fuzz(dtype: str, shape: tuple[int, ...]) -> None:
        check(dtype, shape)

    fuzz()


def test_headers_that_are_no_numbers_at_all(fuzzing: Callable[[float], settings]) -> None:
    """What a process with another version of this code might send."""
    value = st.one_of(st.none(), st.text(max_size=3), st.floats(), st.booleans(), st.binary(max_size=3), st.integers())

    @fuzzing(IN_PROCESS["headers that are no numbers"])
    @given(st.one_of(value, st.sampled_from(["float32", "bfloat16"])), st.one_of(value, st.just(SHAPE)))
    @example([], SHAPE)
    def fuzz(dtype: Any, shape: Any) -> None:
        check(dtype, shape)

    fuzz()
