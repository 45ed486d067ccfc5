"""What stands in shared memory before an embedding, so that whoever reads it knows that it is the one it wants.

It must not know how the memory came to the reader.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass

HEADER_BYTES = mmap.PAGESIZE
"""A whole page, so that the embedding begins on one."""

_MAGIC = b"vitray-1"
_DTYPES = ("bfloat16", "float32")
_FIELDS = struct.Struct("<8s32sIQQIII")
_CHECK = struct.Struct("<I")


class WrongEmbeddingError(RuntimeError):
    """The memory does not hold the embedding that was asked for."""


@dataclass(frozen=True)
class Header:
    digest: str
    """64 hex characters."""
    dtype: str
    shape: tuple[int, int]
    """Tokens, width."""
    grid_thw: tuple[int, int, int]

    def written(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC, bytes.fromhex(self.digest), _DTYPES.index(self.dtype), *self.shape, *self.grid_thw
        )
        return fields + _CHECK.pack(zlib.crc32(fields))


NOTHING = bytes(_FIELDS.size + _CHECK.size)
"""Stands where an embedding is being written."""


def check(found: bytes | memoryview, expected: Header) -> None:
    """Raises WrongEmbeddingError, which says what differs."""
    found = bytes(found[: len(NOTHING)])
    if found == expected.written():
        return
    fields = found[: _FIELDS.size]
    if len(found) < len(NOTHING) or _CHECK.unpack(found[_FIELDS.size :])[0] != zlib.crc32(fields):
        raise WrongEmbeddingError(f"no embedding where that of {expected.digest[:12]} should be")
    _, digest, dtype, rows, width, *grid = _FIELDS.unpack(fields)
    there = f"{digest.hex()[:12]} {rows}x{width} grid {grid} dtype {dtype}"
    raise WrongEmbeddingError(f"the embedding of {there} where {expected} should be")
