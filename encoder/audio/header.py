"""Duration and samples of WAV, FLAC, MP3 and OGG files, read from their headers without decoding.

The content determines the format. A header may lie: what it states is used for admission, and decoding has its own
bounds. Reading takes constant time, whatever the file holds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from encoder.images.structure import ImageError

__all__ = ["FORMATS", "AudioError", "AudioHeader", "read_audio_header"]

DECODING_RULES_VERSION = "audio 1"
"""Part of every digest. Increment it with any change that may alter a decoded sample."""

FORMATS = ("WAV", "FLAC", "MP3", "OGG")
NOT_SUPPORTED = f"not an audio file of a supported format: {', '.join(FORMATS)}"
BROKEN = "the header of the audio file is broken"

MAX_CHUNKS = 1000
"""Chunks of a WAV file that are skipped on the way to its samples."""
SYNC_BYTES = 8192
"""Bytes in which an MP3 file's first frame must begin, after its tags."""
COMPRESSION = 0.5
"""Estimated size of FLAC relative to its samples, if the header does not state their number."""
_MP3_KBPS = {
    1: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Bit rates of layer III for MPEG 1, and for MPEG 2 and 2.5, by the header's field less 1."""


class AudioError(ImageError):
    """An audio file cannot be used. The text is safe to show to a client."""


@dataclass(frozen=True)
class AudioHeader:
    """What a file's header states. For compressed formats without a number of samples, an estimate."""

    seconds: float
    rate: int
    """Samples per second and channel."""
    channels: int

    @property
    def num_samples(self) -> int:
        """Samples of all channels."""
        return int(self.seconds * self.rate * self.channels)


def read_audio_header(data: bytes) -> AudioHeader:
    """Reads the header of an encoded file. Raises AudioError for another format or a broken header."""
    try:
        start = _tag_bytes(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
            header = _wav(data)
        elif data[start : start + 4] == b"fLaC":
            header = _flac(data, start)
        elif data[:4] == b"OggS":
            header = _ogg(data)
        elif start or _is_frame(data, 0):
            header = _mp3(data, start)
        else:
            raise AudioError(NOT_SUPPORTED)
    except AudioError:
        raise
    except (struct.error, ValueError, IndexError, ZeroDivisionError) as error:
        raise AudioError(BROKEN) from error
    if header.rate < 1 or header.channels < 1 or header.seconds <= 0:
        raise AudioError(BROKEN)
    return header


def _wav(data: bytes) -> AudioHeader:
    position, rate, channels, bytes_per_s = 12, 0, 0, 0
    for _ in range(MAX_CHUNKS):
        kind, length = struct.unpack_from("<4sI", data, position)
        position += 8
        if kind == b"fmt ":
            channels, rate, bytes_per_s = struct.unpack_from("<HII", data, position + 2)
        elif kind == b"data":
            # A file that was written to a pipe states no length, or the largest.
            rest = len(data) - position
            return AudioHeader((min(length, rest) or rest) / bytes_per_s, rate, channels)
        position += length + length % 2
    raise AudioError(BROKEN)


def _tag_bytes(data: bytes) -> int:
    """Returns the length of an ID3v2 tag in front of the file, 0 without one."""
    if data[:3] != b"ID3":
        return 0
    first, second, third, fourth = data[6:10]
    return 10 + (first << 21 | second << 14 | third << 7 | fourth)


def _flac(data: bytes, start: int) -> AudioHeader:
    packed = int.from_bytes(data[start + 18 : start + 26], "big")  # in the first block, STREAMINFO
    if len(data) < start + 26:
        raise AudioError(BROKEN)
    rate, channels, bits = packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1
    total = packed & (1 << 36) - 1 or int((len(data) - start) * 8 / COMPRESSION / bits / channels)
    return AudioHeader(total / rate, rate, channels)


def _ogg(data: bytes) -> AudioHeader:
    first = 27 + data[26]  # after the first page's segment table
    last = data.rfind(b"OggS")
    [total] = struct.unpack_from("<q", data, last + 6)
    if data[first : first + 7] == b"\x01vorbis":
        channels, rate = struct.unpack_from("<BI", data, first + 11)
    elif data[first : first + 8] == b"OpusHead":
        channels, rate = data[first + 9], 48_000
        total -= struct.unpack_from("<H", data, first + 10)[0]
    else:
        raise AudioError("an OGG file must hold Vorbis or Opus")
    return AudioHeader(total / rate, rate, channels)


def _mp3(data: bytes, start: int) -> AudioHeader:
    at = next((at for at in range(start, min(start + SYNC_BYTES, len(data) - 3)) if _is_frame(data, at)), None)
    if at is None:
        raise AudioError(BROKEN)
    version = {3: 1.0, 2: 2.0, 0: 2.5}[data[at + 1] >> 3 & 3]
    rate = int((44_100, 48_000, 32_000)[data[at + 2] >> 2 & 3] / {1.0: 1, 2.0: 2, 2.5: 4}[version])
    channels = 1 if data[at + 3] >> 6 == 3 else 2
    side = {(True, 2): 32, (True, 1): 17, (False, 2): 17, (False, 1): 9}[version == 1.0, channels]
    tag = at + 4 + side
    if data[tag : tag + 4] in (b"Xing", b"Info") and data[tag + 7] & 1:
        [frames] = struct.unpack_from(">I", data, tag + 8)
        return AudioHeader(frames * (1152 if version == 1.0 else 576) / rate, rate, channels)
    kbps = _MP3_KBPS[1 if version == 1.0 else 2][(data[at + 2] >> 4) - 1]
    return AudioHeader((len(data) - at) / (kbps * 125), rate, channels)


def _is_frame(data: bytes, at: int) -> bool:
    """Whether a frame of MPEG layer III begins at `at`."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:
        return False
    return data[at + 1] >> 3 & 3 != 1 and 0 < data[at + 2] >> 4 < 15 and data[at + 2] >> 2 & 3 != 3
