"""Embeddings on the way: bits unchanged, and every header that disagrees with its bytes refused."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.common import messages
from deployments.common.messages import EncodedImage, EncodeTimings, WireError
from deployments.routing.affinity import Call
from encoder import item_header
from encoder.images.size import PixelBounds
from encoder.packing.run_counts import RunRecord
from encoder.video.size import VideoChunk
from tests.unit.deployments.transfer.stored_embeddings import tokens_of

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
def test_every_bit_pattern_is_packed_as_it_is(bits: list[int], dtype: torch.dtype) -> None:
    """Infinities and every NaN among them: what travels are bits."""
    values = torch.from_numpy(np.array(bits, dtype=np.uint16).reshape(-1, WIDTH)).view(torch.bfloat16)
    tokens = values if dtype is torch.bfloat16 else values.float()
    image = EncodedImage.pack(tokens, DIGEST, TIMINGS)
    arrived = tokens_of(image)
    integer = torch.int16 if dtype is torch.bfloat16 else torch.int32
    assert arrived.dtype is dtype
    assert torch.equal(arrived.view(integer), tokens.view(integer))


def test_num_bytes_is_what_the_cache_is_charged() -> None:
    assert packed(dtype=torch.bfloat16).num_bytes == 6 * WIDTH * 2
    assert packed(dtype=torch.float32).num_bytes == 6 * WIDTH * 4


def test_a_view_of_a_larger_tensor_is_packed_as_itself() -> None:
    whole = torch.arange(6 * 2 * WIDTH, dtype=torch.float32).reshape(6, 2 * WIDTH)
    image = EncodedImage.pack(whole[:, ::2], DIGEST, TIMINGS)
    assert torch.equal(tokens_of(image), whole[:, ::2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_cannot_be_packed(dtype: torch.dtype) -> None:
    with pytest.raises(WireError, match=str(dtype).removeprefix("torch.")):
        packed(dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "float16"}, r"'float16' is unknown; known: bfloat16, float32"),
        ({"dtype": []}, r"\[\] is unknown; known"),
        ({"shape": (6, WIDTH + 1)}, r"\(6, 7\) is not the expected \(6, 6\)"),
        ({"shape": (5, WIDTH)}, r"\(5, 6\) is not the expected \(6, 6\)"),
        ({"shape": (6 * WIDTH,)}, r"\(36,\) is not the expected"),
        ({"shape": (1, 6, WIDTH)}, r"\(1, 6, 6\) is not the expected"),
    ],
)
def test_every_mismatch_is_refused_with_both_values(changes: dict[str, Any], told: str) -> None:
    """A wrong width would kill vLLM's engine, so nothing that does not fit may pass."""
    image = dataclasses.replace(packed().to_shared(), **changes)
    with pytest.raises(WireError, match=told):
        image.check((6, WIDTH))


def test_the_shape_is_the_language_models() -> None:
    packed().to_shared().check((6, WIDTH))
    for expected in ((6, 2 * WIDTH), (9, WIDTH)):
        with pytest.raises(WireError, match=r"\(6, 6\) is not the expected"):
            packed().to_shared("server").check(expected)


def test_the_version_is_raised_with_every_change_of_a_message() -> None:
    """If this fails: raise PROTOCOL_VERSION, and put the new digest here."""
    found = [
        one
        for module in (messages, item_header)
        for _, one in sorted(vars(module).items())
        if isinstance(one, type) and dataclasses.is_dataclass(one) and one.__module__ == module.__name__
    ]
    described = [
        f"{one.__name__}.{field.name}: {field.type}"
        for one in (*found, VideoChunk, PixelBounds, RunRecord, Call)
        for field in dataclasses.fields(one)
    ]
    for file in ("encoder_replica/deployment.py", "llm/deployment.py", "common/ray_private.py"):
        tree = ast.parse((Path(messages.__file__).parents[1] / file).read_text())
        described += [
            f"{one.name}({ast.unparse(one.args)})"
            for one in ast.walk(tree)
            if isinstance(one, ast.AsyncFunctionDef | ast.FunctionDef)
            and one.name in ("encode", "plan", "handle", "_received")
        ]
    assert len(described) > 100
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
    assert (messages.PROTOCOL_VERSION, digest) == (4, "b347dee538304366")
