"""Header before each embedding in shared memory, by which a reader verifies which embedding the memory holds."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.common.messages import EncodedImage, SharedEmbedding

HEADER_BYTES = mmap.PAGESIZE
"""One page, so that the embedding starts at a page boundary."""

_MAGIC = b"vitray-3"
_DTYPES = {"bfloat16": 2, "float32": 4}
"""Bytes per element; a header stores the index in this table."""
_FIELDS = struct.Struct("<8s32sIQQ")


class WrongEmbeddingError(RuntimeError):
    """The memory does not hold the requested embedding."""


@dataclass(frozen=True)
class Header:
    digest: str
    """64 hex characters."""
    dtype: str
    shape: tuple[int, int]
    """`(num_tokens, width)`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the embedding, without the header."""
        return self.shape[0] * self.shape[1] * _DTYPES[self.dtype]

    @classmethod
    def of(cls, image: EncodedImage | SharedEmbedding) -> Header:
        return cls(image.digest, image.dtype, image.shape)

    def to_bytes(self) -> bytes:
        return _FIELDS.pack(_MAGIC, bytes.fromhex(self.digest), list(_DTYPES).index(self.dtype), *self.shape)


EMPTY_HEADER = bytes(_FIELDS.size)
"""Written in place of the header while the embedding is being written."""


def embedding_view(flat: Tensor, header: Header) -> Tensor:
    """Returns the embedding `[num_tokens, width]`, a view of `flat`: uint8, from the first byte of the header on.

    Raises WrongEmbeddingError if another embedding or none is stored there.
    """
    verify_header(flat[: len(EMPTY_HEADER)].numpy().tobytes(), header)
    return flat[HEADER_BYTES:][: header.num_bytes].view(getattr(torch, header.dtype)).view(header.shape)


def verify_header(found: bytes | memoryview, expected: Header) -> None:
    """Raises WrongEmbeddingError if the first bytes of `found` are not those of the header `expected`."""
    if bytes(found[: len(EMPTY_HEADER)]) != expected.to_bytes():
        raise WrongEmbeddingError(f"found no embedding, or another, instead of the embedding of {expected.digest[:12]}")
