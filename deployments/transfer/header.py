"""Header before each embedding in shared memory, by which a reader verifies which embedding the memory holds."""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass

from torch import Tensor

from deployments.common.messages import EncodedImage, SharedEmbedding, tensor_of_bytes

HEADER_BYTES = mmap.PAGESIZE
"""One page, so that the embedding starts at a page boundary."""

_MAGIC = b"vitray-2"
_DTYPES = {"bfloat16": 2, "float32": 4}
"""Bytes per element; a header stores the index in this table."""
_FIELDS = struct.Struct("<8s32sIQQ")
_CHECK = struct.Struct("<I")


class WrongEmbeddingError(RuntimeError):
    """The memory does not hold the requested embedding."""


@dataclass(frozen=True)
class Header:
    digest: str
    """64 hex characters."""
    dtype: str
    shape: tuple[int, int]
    """`(num_tokens, width)`."""

    @classmethod
    def of(cls, image: EncodedImage | SharedEmbedding) -> Header:
        return cls(image.digest, image.dtype, image.shape)

    def to_bytes(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, bytes.fromhex(self.digest), list(_DTYPES).index(self.dtype), *self.shape)
        return fields + _CHECK.pack(zlib.crc32(fields))


EMPTY_HEADER = bytes(_FIELDS.size + _CHECK.size)
"""Written in place of the header while the embedding is being written."""


def embedding_view(flat: Tensor, header: Header) -> Tensor:
    """Returns the embedding `[num_tokens, width]`, a view of `flat`: uint8, from the first byte of the header on.

    Raises WrongEmbeddingError if another embedding or none is stored there.
    """
    verify_header(flat[: len(EMPTY_HEADER)].numpy().tobytes(), header)
    rows, width = header.shape
    end = HEADER_BYTES + rows * width * _DTYPES[header.dtype]
    return tensor_of_bytes(flat[HEADER_BYTES:end], header.dtype, header.shape)


def verify_header(found: bytes | memoryview, expected: Header) -> None:
    """Raises WrongEmbeddingError, which names the difference, if `found` is not the header `expected`."""
    found = bytes(found[: len(EMPTY_HEADER)])
    if found == expected.to_bytes():
        return
    fields = found[: _FIELDS.size]
    if len(found) < len(EMPTY_HEADER) or _CHECK.unpack(found[_FIELDS.size :])[0] != zlib.crc32(fields):
        raise WrongEmbeddingError(f"no embedding where that of {expected.digest[:12]} should be")
    _, digest, dtype, rows, width = _FIELDS.unpack(fields)
    there = f"{digest.hex()[:12]} {rows}x{width} dtype {dtype}"
    raise WrongEmbeddingError(f"the embedding of {there} where {expected} should be")
