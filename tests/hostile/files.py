"""Image files that mean harm, generated. Each is a whole file around a good picture; none is on a disk."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """Noise, so that every byte of a file counts."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


PNG, JPEG, GIF, WEBP, BMP, TIFF = (encoded(picture(), name) for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"))


def chunk(kind: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png_with(before: bytes = b"", after: bytes = b"") -> bytes:
    """Chunks put in before and after the pixels."""
    return PNG[:33] + before + PNG[33:-12] + after + PNG[-12:]


def png_stating(width: int, height: int) -> bytes:
    """A header of another size than the pixels, with a right checksum."""
    return PNG_SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + PNG[33:]


def jpeg_with(segments: bytes) -> bytes:
    return JPEG[:2] + segments + JPEG[2:]


def jpeg_segment(marker: int, payload: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def gif_with(blocks: bytes) -> bytes:
    start = 13 + (3 << ((GIF[10] & 7) + 1) if GIF[10] & 0x80 else 0)
    return GIF[:start] + blocks + GIF[start:]


def webp_with(chunks: bytes) -> bytes:
    whole = WEBP + chunks
    return whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]


def exif(num_entries: int, count: int = 1, tail: int = 0) -> bytes:
    """EXIF whose directory has many entries, each of them stating `count` values from its beginning on."""
    entries = b"".join(struct.pack("<HHII", index + 1, 2, count, 0) for index in range(num_entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + entries + bytes(4 + tail)


def header_bombs(num_bytes: int) -> dict[str, bytes]:
    """Files of about `num_bytes` that keep a reader of their headers busy: seconds and minutes at 20 MB."""
    photoshop = b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5000
    inflating = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1_000_000)))
    name, digits = b"Raw profile type exif\0", b"\nexif\n 1\n" + exif(20_000).hex().encode()
    return {
        "png chunks before": png_with(chunk(b"prVt") * (num_bytes // 12)),
        "png chunks after": png_with(after=chunk(b"prVt") * (num_bytes // 12)),
        "png texts before": png_with(chunk(b"tEXt", b"k\0v") * (num_bytes // 15)),
        "png texts after": png_with(after=chunk(b"tEXt", b"k\0v") * (num_bytes // 15)),
        "png texts that inflate": png_with(inflating * 60),
        "png exif": png_with(chunk(b"eXIf", exif(65_535))),
        "png exif as text": png_with(chunk(b"zTXt", name + b"\0" + zlib.compress(digits))),
        "png exif as international text": png_with(chunk(b"iTXt", name + b"\0\0en\0\0" + digits)),
        "png exif as inflating text": png_with(chunk(b"iTXt", name + b"\1\0\0\0" + zlib.compress(digits))),
        "png exif as bytes of a text": png_with(chunk(b"tEXt", b"exif\0" + exif(65_535))),
        "jpeg comments": jpeg_with(b"\xff\xfe\0\2" * (num_bytes // 4)),
        "jpeg fill bytes": jpeg_with(b"\xff" * num_bytes),
        "jpeg junk": jpeg_with(bytes(num_bytes)),
        "jpeg tables": jpeg_with((b"\xff\xdb\0\x43\0" + bytes(64)) * (num_bytes // 69)),
        "jpeg photoshop": jpeg_with(jpeg_segment(0xED, photoshop) * (num_bytes // 60_000 + 1)),
        "jpeg exif": jpeg_with(jpeg_segment(0xE1, b"Exif\0\0" + exif(5000, 60_000))),
        "gif comments": gif_with(b"!\xfe\1x\0" * (num_bytes // 5)),
        "gif one comment": gif_with(b"!\xfe" + b"\1x" * (num_bytes // 2) + b"\0"),
        "gif junk": gif_with(bytes(num_bytes)),
        "webp exif": encoded(picture(), "WEBP", exif=exif(60_000)),
        "webp chunks": webp_with(b"JUNK\0\0\0\0" * (num_bytes // 8)),
        "tiff entries": exif(65_535, 2, 100),
    }
