"""Headers of items: prompt updates as runs, and what a header refuses."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.item_header import MAX_IMAGE_HEADER_BYTES, HeaderError, ItemHeader, PromptRun, PromptUpdate
from tests.programs import output_of_python

DIGEST = "ab" * 32


def update(*runs: PromptRun) -> PromptUpdate:
    return PromptUpdate("replace", (9,), runs)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans())))
def test_runs_give_back_the_tokens_and_the_mask(tokens: list[tuple[int, bool]]) -> None:
    made = PromptUpdate.of_tokens("replace", (1,), tokens)
    assert list(zip(made.tokens, made.mask, strict=True)) == tokens
    assert made.num_embeds == sum(is_embed for _, is_embed in tokens)
    assert all(one[::2] != other[::2] for one, other in zip(made.runs, made.runs[1:], strict=False))


def test_the_largest_image_fits_easily() -> None:
    header = ItemHeader(DIGEST, "image", 16_384, (update(PromptRun(151655, 16_384, True)),), (1, 256, 256))
    assert len(pickle.dumps(header)) < 512
    assert pickle.loads(pickle.dumps(header)) == header


def test_rows_must_be_those_that_the_updates_take() -> None:
    """The engine would not survive another number of rows."""
    with pytest.raises(HeaderError, match=r"the embedding has 3 rows, its prompt updates take \[4\]"):
        ItemHeader(DIGEST, "image", 3, (update(PromptRun(9, 4, True), PromptRun(8, 1, False)),), (1, 4, 4))
    with pytest.raises(HeaderError, match="0 rows"):
        ItemHeader(DIGEST, "image", 0, (update(PromptRun(9, 4, False)),), (1, 4, 4))
    with pytest.raises(HeaderError, match=r"take \[1, 2\]"):
        ItemHeader(DIGEST, "image", 1, (update(PromptRun(9, 1, True)), update(PromptRun(9, 2, True))), (1, 4, 4))
    with pytest.raises(HeaderError, match=r"take \[\]"):
        ItemHeader(DIGEST, "image", 1, (), (1, 4, 4))


def test_headers_of_images_are_at_most_4_kib() -> None:
    runs = (update(PromptRun(9, 1, True)),)
    with pytest.raises(
        HeaderError, match=f"the header of the image has .* bytes, the limit is {MAX_IMAGE_HEADER_BYTES}"
    ):
        ItemHeader(DIGEST, "image", 1, runs, bytes(4000))
    ItemHeader(DIGEST, "image", 1, runs, bytes(3500))
    ItemHeader(DIGEST, "video", 1, runs, bytes(100_000))
    with pytest.raises(HeaderError, match="the header of the video"):
        ItemHeader(DIGEST, "video", 1, runs, bytes(300_000))


def test_headers_need_no_torch() -> None:
    output_of_python("import sys, encoder.item_header; sys.exit('torch' in sys.modules)")
