"""Files whose headers keep a reader busy, against the reading that the ingress does on its event loop.

How much a reader works is told by counting Python's own steps, not by a clock.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from types import FrameType
from typing import Any

import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from encoder.images import load as image_load
from encoder.images import structure
from encoder.images.size import ImageError, read_header
from tests.hostile import files

# At 20 MB, what the ingress takes by default, each would be twenty times as many.
BOMB_BYTES = 1_000_000
MOST_STEPS = 60_000
"""Lines of Python. A good file's header takes a few thousand; a bomb's, read by Pillow, many more than these."""


class TooManySteps(Exception):
    pass


def steps(work: Callable[[], Any]) -> int:
    """Lines of Python that `work` runs, counted up to a little over MOST_STEPS."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count > MOST_STEPS:
                raise TooManySteps
        return trace

    sys.settrace(trace)
    try:
        work()
    except (TooManySteps, ImageError, OSError, SyntaxError, ValueError):
        pass
    finally:
        sys.settrace(None)
    return count


def naive(data: bytes) -> None:
    """What others do for an image's size: Pillow, its orientation, and the metadata that follows the pixels."""
    image = Image.open(BytesIO(data))
    ImageOps.exif_transpose(image)


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    Image.init()
    return files.header_bombs(BOMB_BYTES)


NAMES = tuple(files.header_bombs(1000))


@pytest.mark.parametrize("name", NAMES)
def test_a_header_bomb_is_refused_at_once(name: str, bombs: dict[str, bytes]) -> None:
    assert steps(lambda: read_header(bombs[name])) < MOST_STEPS / 2
    with pytest.raises(ImageError, match=r"the limit is|bytes of EXIF as text|not an image"):
        read_header(bombs[name])


@pytest.mark.filterwarnings("ignore:Tag data")
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("webp chunks", "png texts that inflate", "jpeg junk")]
)
def test_a_header_bomb_keeps_pillow_busy(name: str, bombs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail. Two bombs go off in C, where no steps are counted; other versions of Pillow walk
    through junk."""
    monkeypatch.setattr(image_load, "check_structure", lambda _: None)
    busy = max(steps(lambda: read_header(bombs[name])), steps(lambda: naive(bombs[name])))
    assert busy > MOST_STEPS


TIFF_SIGNATURES = sorted({*TiffImagePlugin.PREFIXES, b"MM\0+", b"II+\0"})


def block(signature: bytes, num_entries: int, *, refers: int = 0) -> bytes:
    """EXIF of one directory, to which `refers` of its first entries refer as a directory below it."""
    order = "<" if signature.startswith(b"I") else ">"
    tags = sorted((0x8769, 0x8825, 0xA005)[:refers]) + list(range(0xB000, 0xB000 + num_entries - refers))
    place, number, entry = ("HHQ", "Q", "HHQQ") if signature == b"II+\0" else ("I", "H", "HHII")
    first = 16 if signature == b"II+\0" else 8
    start = signature + struct.pack(order + place, *([8, 0, first] if first == 16 else [first]))
    entries = [struct.pack(order + entry, tag, 4, 1, first) for tag in tags]
    return start + struct.pack(order + number, len(entries)) + b"".join(entries) + bytes(8)


@pytest.mark.parametrize("signature", TIFF_SIGNATURES)
def test_entries_are_counted_behind_every_signature_that_pillow_accepts(signature: bytes) -> None:
    """Three were unknown: 780 kB took four seconds of the thread that reads all bodies."""
    assert structure.signature_format(signature + bytes(8)) == "TIFF"
    for refers in (0, 3):
        most = 1000 // (refers + 1)
        structure.check_structure(files.png_with(files.chunk(b"eXIf", block(signature, most, refers=refers))))
        for wrapped in (
            files.chunk(b"eXIf", block(signature, most + 1, refers=refers)),
            files.chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(as_text(signature, most + 1, refers))),
            files.chunk(b"tEXt", b"Raw profile type exif\0" + as_text(signature, most + 1, refers)),
            files.chunk(b"iTXt", b"Raw profile type exif\0\0\0en\0\0" + as_text(signature, most + 1, refers)),
        ):
            with pytest.raises(ImageError, match="too many metadata entries, the limit is 1000"):
                structure.check_structure(files.png_with(wrapped))


def as_text(signature: bytes, num_entries: int, refers: int) -> bytes:
    """EXIF as some writers put it into a text of a PNG."""
    content = block(signature, num_entries, refers=refers)
    digits = content.hex().encode()
    return b"\nexif\n%8d\n" % len(content) + b"\n".join(digits[at : at + 72] for at in range(0, len(digits), 72))


def test_exif_as_text_is_read_as_pillow_does() -> None:
    """Or what is counted would not be what is read."""
    image = Image.open(
        BytesIO(files.png_with(files.chunk(b"tEXt", b"Raw profile type exif\0" + as_text(b"II*\0", 5, 0))))
    )
    assert len(image.getexif()) == 5


@pytest.mark.parametrize("data", [files.PNG, files.JPEG, files.GIF, files.WEBP, files.BMP, files.TIFF])
def test_what_cameras_and_editors_write_passes(data: bytes) -> None:
    assert (read_header(data).width, read_header(data).height) == (64, 48)


def test_generous_metadata_passes() -> None:
    """A profile in 255 segments, hundreds of entries, texts and thousands of chunks with pixels."""
    profile = b"".join(
        files.jpeg_segment(0xE2, b"ICC_PROFILE\0" + bytes([number, 255]) + bytes(5000)) for number in range(1, 256)
    )
    metadata = files.jpeg_segment(0xE1, b"Exif\0\0" + files.exif(900, 4))
    assert read_header(files.jpeg_with(profile + metadata)).format == "JPEG"
    texts = files.chunk(b"tEXt", b"Title\0x") * 500 + files.chunk(b"iTXt", b"k\0\0\0\0\0x") * 10
    assert (
        read_header(files.png_with(texts + files.chunk(b"eXIf", files.exif(900)), after=texts[:1000])).format == "PNG"
    )
    large = files.encoded(files.picture(1500, 1500), "PNG")
    structure.check_structure(large)
    assert large.count(b"IDAT") > 100


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (files.PNG, "PNG"),
        (files.JPEG, "JPEG"),
        (files.GIF, "GIF"),
        (files.WEBP, "WEBP"),
        (files.BMP, "BMP"),
        (files.TIFF, "TIFF"),
    ],
)
def test_a_format_is_what_the_content_says_and_nothing_else(start: bytes, name: str) -> None:
    """The ingress and the decoders allow other lists, and Pillow tries one reader after the other: a file that two of
    them take would be measured as one image and decoded as another."""
    assert structure.signature_format(start) == name
    assert read_header(start, formats=(name,)).format == name
    others = tuple(other for other in image_load.FORMATS if other != name)
    with pytest.raises(ImageError, match="not an image of a supported format"):
        read_header(start, formats=others)


def test_a_file_of_two_formats_is_read_as_its_beginning_says() -> None:
    """Photo CD's reader looks 2048 bytes further in, where a PNG may hold anything."""
    filler = 2048 - 33 - 8
    both = files.png_with(files.chunk(b"prVt", bytes(filler) + b"PCD_" + bytes(200_000)))
    assert both[2048:2052] == b"PCD_"
    with Image.open(BytesIO(both), formats=("PCD", "PNG")) as seen:
        assert seen.format == "PCD", "what Pillow makes of it"
    assert read_header(both).format == "PNG"
