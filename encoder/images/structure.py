"""Limits on the metadata of image files, checked before Pillow parses them.

Pillow iterates over chunks, markers and blocks in Python, some of them in quadratic time, and stores their contents. A
file of megabytes may have millions of them and occupy a process for minutes before its size is known. Real images have
dozens.
"""

from __future__ import annotations

import re
import struct
import zlib

MAX_METADATA_PIECES = 1000
"""Maximum number of PNG chunks without pixels, of JPEG markers, and of GIF blocks before the first frame."""
MAX_COMPRESSED_TEXTS = 16
"""Maximum number of compressed PNG text chunks, which expand to up to a megabyte each."""
MAX_JPEG_SCANS = 100
"""Maximum number of scans of a JPEG; progressive files have about ten."""
MAX_EXIF_ENTRIES = 1000
"""Maximum number of entries of an EXIF or TIFF directory and its sub-directories; the standards define a few
hundred."""
MAX_EXIF_TEXT_BYTES = 2**17
"""Maximum size of EXIF stored as hexadecimal text in a PNG."""
BYTES_A_PIECE = 256
"""Minimum average bytes per PNG or WebP chunk, pixel chunks included; encoders write thousands."""

_PNG = b"\x89PNG\r\n\x1a\n"
_TIFF = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
"""Signatures that Pillow accepts, those of the wrong byte order among them."""
_SIGNATURES = (
    (_PNG, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    *((start, "TIFF") for start in _TIFF),
)
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""A marker with a length, or the end of the image, among entropy-coded data."""
_SUB_DIRECTORIES = (0x8769, 0x8825, 0xA005)  # EXIF, GPS, interoperability: Pillow reads them unasked
_PNG_PIXELS = (b"IDAT", b"fdAT", b"fcTL")


class ImageError(ValueError):
    """An image cannot be used. The text states the reason and is safe to show to a client: no addresses, no paths."""


def signature_format(data: bytes) -> str | None:
    """Returns Pillow's name of the format of the file's signature; None for an unknown signature.

    A file with a known signature is parsed only as that format: some parsers search for theirs further into the file.
    """
    if data[8:12] == b"WEBP" and data.startswith(b"RIFF"):
        return "WEBP"
    return next((name for start, name in _SIGNATURES if data.startswith(start)), None)


def check_structure(data: bytes) -> None:
    """Raises ImageError, which names the limit, for a file with too many metadata pieces."""
    if data.startswith(_PNG):
        _check_png(data)
    elif data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    elif data[:6] in (b"GIF87a", b"GIF89a"):
        _check_gif(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        _check_webp(data)
    elif data[:4] in _TIFF:
        _check_directories(data)


def _check_png(data: bytes) -> None:
    position, chunks, metadata, texts = len(_PNG), 0, 0, 0
    most = MAX_METADATA_PIECES + len(data) // BYTES_A_PIECE
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        position += length + 12
        chunks += 1
        metadata += kind not in _PNG_PIXELS
        texts += kind in (b"zTXt", b"iTXt")
        if metadata > MAX_METADATA_PIECES:
            raise _too_many("PNG metadata chunks", MAX_METADATA_PIECES)
        if kind == b"eXIf":
            _check_directories(data[position - length - 4 : position - 4])
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            _check_exif_text(kind, data[position - length - 4 : position - 4])
        if texts > MAX_COMPRESSED_TEXTS:
            raise _too_many("compressed texts", MAX_COMPRESSED_TEXTS)
        if chunks > most:
            raise _too_many("PNG chunks for its size", most)


def _check_jpeg(data: bytes) -> None:
    position, exif = 2, b""
    for _ in range(MAX_METADATA_PIECES):
        if position + 4 > len(data) or data[position : position + 2] == b"\xff\xda":  # end of file, or start of pixels
            break
        marker = data[position + 1]
        if data[position] != 0xFF or marker == 0xFF:  # Pillow scans for a marker byte by byte
            position += 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:  # markers without a length
            position += 2
        else:
            length = struct.unpack_from(">H", data, position + 2)[0]
            if marker == 0xE1 and data.startswith(b"Exif\0\0", position + 4):
                exif += data[position + 10 : position + 2 + length]
            position += 2 + length
    else:
        raise _too_many("JPEG markers", MAX_METADATA_PIECES)
    _check_jpeg_scans(data, position)
    _check_directories(exif)
    if data.count(b"8BIM", 0, position) > MAX_METADATA_PIECES:
        raise _too_many("Photoshop blocks", MAX_METADATA_PIECES)


def _check_jpeg_scans(data: bytes, position: int) -> None:
    """Counts the scans from `position`, that of the first one. Each takes as long to decode as all pixels, and may have
    a few bytes."""
    scans = 0
    for _ in range(MAX_METADATA_PIECES):
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or marker[0] == b"\xff\xd9" or marker.end() + 2 > len(data):
            return
        scans += marker[0] == b"\xff\xda"
        if scans > MAX_JPEG_SCANS:
            raise _too_many("JPEG scans", MAX_JPEG_SCANS)
        position = marker.end() + struct.unpack_from(">H", data, marker.end())[0]
    raise _too_many("JPEG markers", MAX_METADATA_PIECES)


def _check_gif(data: bytes) -> None:
    if len(data) < 13:
        return
    position = 13 + (3 << ((data[10] & 7) + 1) if data[10] & 0x80 else 0)
    in_extension = False
    for _ in range(MAX_METADATA_PIECES):
        if position >= len(data):
            return
        first = data[position]
        if in_extension:
            in_extension = first != 0
            position += 1 + first
        elif first in (0x2C, 0x3B):  # frame or trailer
            return
        elif first == 0x21:
            in_extension = True
            position += 2
        else:  # Pillow skips it
            position += 1
    raise _too_many("GIF blocks before its first frame", MAX_METADATA_PIECES)


def _check_webp(data: bytes) -> None:
    position = 12
    for _ in range(MAX_METADATA_PIECES + len(data) // BYTES_A_PIECE):
        if position + 8 > len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == b"EXIF":
            _check_directories(data[position + 8 : position + 8 + length])
        position += 8 + length + length % 2
    raise _too_many("WebP chunks for its size", MAX_METADATA_PIECES + len(data) // BYTES_A_PIECE)


def _check_exif_text(kind: bytes, chunk: bytes) -> None:
    """Limits EXIF in a PNG text chunk, where writers without the eXIf chunk store it as hexadecimal digits.

    Pillow takes it from every kind of text, and as bytes from an uncompressed one named "exif".
    """
    name = chunk[:100].partition(b"\0")[0]
    text = chunk[len(name) + 1 :]
    if kind == b"tEXt" and name == b"exif":
        _check_directories(text)
    if name != b"Raw profile type exif":
        return
    compressed = kind == b"zTXt"
    if kind == b"iTXt":  # flag and method of the compression, language, translated name, text
        compressed = not text.startswith(b"\0")
        text = text[:1] + text[2:].split(b"\0", 2)[-1]
    if compressed:
        try:
            text = zlib.decompressobj().decompress(text[1:], MAX_EXIF_TEXT_BYTES + 1)
        except zlib.error:
            return  # Pillow cannot read it either
    if len(text) > MAX_EXIF_TEXT_BYTES:
        raise ImageError(f"image has over {MAX_EXIF_TEXT_BYTES} bytes of EXIF as text, the limit")
    digits = "".join(text.decode("latin-1").split("\n")[3:])  # after a line end, a name and a length
    try:
        block = bytes.fromhex(digits)
    except ValueError:
        return  # Pillow cannot read it either
    _check_directories(block)


def _check_directories(block: bytes) -> None:
    """Checks the number of entries of the first TIFF or EXIF directory and its sub-directories; reads no values."""
    while block.startswith(b"Exif\0\0"):
        block = block[6:]
    if block[:4] not in _TIFF:
        return
    order = "<" if block.startswith(b"I") else ">"
    if b"+" in block[:4]:
        _check_entries(block, order, "Q", "Q", "HHQQ")
    if block[2] != ord("+"):  # Pillow reads MM\0+ as a file with addresses of 32 bits
        _check_entries(block, order, "I", "H", "HHII")


def _check_entries(block: bytes, order: str, place: str, number: str, entry: str) -> None:
    """`place`, `number` and `entry`: formats of an address, a number of entries and an entry."""
    number_bytes, entry_bytes = struct.calcsize(order + number), struct.calcsize(order + entry)

    def num_entries(offset: int) -> int:
        """Returns the directory's number of entries, at most as many as fit the block, where parsers stop."""
        room = len(block) - offset - number_bytes
        return 0 if room < 0 else min(struct.unpack_from(order + number, block, offset)[0], room // entry_bytes)

    first_at = struct.calcsize(order + place)
    if len(block) < 2 * first_at:
        return
    (first,) = struct.unpack_from(order + place, block, first_at)
    total = num_in_first = num_entries(first)
    for index in range(min(num_in_first, MAX_EXIF_ENTRIES)):
        tag, _, _, value = struct.unpack_from(order + entry, block, first + number_bytes + index * entry_bytes)
        total += num_entries(value) if tag in _SUB_DIRECTORIES else 0
    if total > MAX_EXIF_ENTRIES:
        raise _too_many("metadata entries", MAX_EXIF_ENTRIES)


def _too_many(what: str, limit: int) -> ImageError:
    return ImageError(f"image has too many {what}, the limit is {limit}")
