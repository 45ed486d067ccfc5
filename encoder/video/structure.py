"""The format of a video file by its first bytes, and limits that are checked before FFmpeg parses it.

FFmpeg's MP4 demuxer allocates a record per sample that a table declares, also where the table itself takes no bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal

from encoder.video.bounds import CORRUPT, VideoError

Format = Literal["mp4", "webm", "gif", "frames"]

MAX_SAMPLES = 2**22
"""Maximum number of samples that the tables of an MP4 declare, all tracks together; FFmpeg takes 24 bytes for each."""

NOT_SUPPORTED = "not a video of a supported format; supported: MP4 (H.264, HEVC), WebM (VP9), GIF, video/jpeg frames"

_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{16}")
_TABLE = re.compile(rb"(stsz|stz2|trun)(?=(.{12}))", re.DOTALL)


def detect_format(data: bytes) -> Format:
    """Returns the format of a video. Raises VideoError if it is none of the supported ones."""
    if data[4:8] in _MP4_BOXES:
        return "mp4"
    if data.startswith(_EBML):
        return "webm"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if _BASE64.match(data):
        return "frames"
    raise VideoError(NOT_SUPPORTED)


def check_structure(data: bytes, kind: Format) -> None:
    """Raises VideoError for a file that ends early, and for one that declares too many samples."""
    if kind == "mp4":
        _check_mp4(data)
    elif kind == "webm":
        _check_segment(data)
    elif kind == "gif" and data[-1:] != b";" and b";" not in data[-64:]:  # some writers pad the trailer
        raise VideoError(CORRUPT)


def _check_mp4(data: bytes) -> None:
    samples = 0
    for box, start, end in _boxes(data):
        if box not in (b"moov", b"moof"):
            continue
        if data.find(b"cmov", start, end) >= 0:
            raise VideoError("video has a compressed header, which is not supported")
        for table in _TABLE.finditer(data, start, end):
            _, first, second = struct.unpack(">III", table[2])
            samples += first if table[1] == b"trun" else second
    if samples > MAX_SAMPLES:
        raise VideoError(f"video declares {samples} samples, the limit is {MAX_SAMPLES}")


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields kind, start and end of the top-level boxes. Raises VideoError if the file ends within one."""
    start = 0
    while start + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        if size == 1 and start + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, start + 8)
        elif size == 0:
            size = len(data) - start
        if size < 8 or start + size > len(data):
            raise VideoError(CORRUPT)
        yield kind, start, start + size
        start += size


def _check_segment(data: bytes) -> None:
    """Checks that the Segment, whose size is unknown in live recordings, ends within the file."""
    start = data.find(_SEGMENT, 0, 4096) + len(_SEGMENT)
    if start < len(_SEGMENT) or start >= len(data) or not data[start]:
        raise VideoError(CORRUPT)
    length = 9 - data[start].bit_length()
    size = int.from_bytes(data[start : start + length], "big") & ((1 << 7 * length) - 1)
    if size != (1 << 7 * length) - 1 and start + length + size > len(data):
        raise VideoError(CORRUPT)
