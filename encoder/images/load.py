"""Decodes image files to upright RGB exactly as vLLM's image loader does, and reads sizes without decoding.

Unlike vLLM, which may continue with a part of an image, it refuses files that Pillow cannot decode without an error,
and files with thousands of metadata pieces (`structure.py`). The ingress reads sizes with `read_header`; worker
processes decode with `load_rgb`. Every failure is an `ImageError`, whose text may be shown to a client.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from encoder.images.structure import ImageError, check_structure, signature_format

__all__ = ["FORMATS", "ImageError", "ImageHeader", "check_pixels", "load_rgb", "read_header", "to_rgb"]

DECODING_RULES_VERSION = "1"
"""Part of every digest. Increment it with any change that may alter a decoded or resized pixel."""

MAX_PIXELS_DECODED = 178_956_970
"""Default limit in pixels; Pillow's own hard limit and vLLM's default."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that the setting `ingress.image_formats` may list, by Pillow's names."""

NOT_SUPPORTED = "not an image of a supported format"

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class ImageHeader:
    """Width and height in pixels after EXIF orientation, and Pillow's format name."""

    width: int
    height: int
    format: str


def read_header(
    data: bytes, *, max_pixels_decoded: int = MAX_PIXELS_DECODED, formats: tuple[str, ...] = FORMATS
) -> ImageHeader:
    """Reads size and format of an encoded image without decoding its pixels. The content determines the format.

    Raises ImageError for data in none of the `formats`, a broken header, or more than `max_pixels_decoded` pixels.
    """
    with _client_safe():
        image = _open(data, max_pixels_decoded, formats)
        width, height = _upright_size(image, data)
        return ImageHeader(width, height, image.format or "")


def load_rgb(
    data: bytes, *, max_pixels_decoded: int = MAX_PIXELS_DECODED, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Decodes `data` to an RGB image: EXIF orientation applied, transparency on white, other modes converted.

    Raises ImageError as `read_header` does, and for truncated or corrupt data.
    """
    with _client_safe():
        image = _open(data, max_pixels_decoded, formats)
        stated = _upright_size(image, data)
        rgb = _upright_rgb(image)
        # Admission relies on the size that the header states.
        if rgb.size != stated:
            raise ImageError("image header states {}x{} pixels, but {}x{} were decoded".format(*stated, *rgb.size))
        return rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts a PIL image to upright RGB as `load_rgb` does, without changing it. Raises ImageError."""
    with _client_safe():
        return _upright_rgb(image)


def _open(data: bytes, max_pixels_decoded: int, formats: tuple[str, ...]) -> Image.Image:
    check_structure(data)
    stated = signature_format(data)
    if stated is not None:
        formats = (stated,) if stated in formats else ()
    if not formats:
        raise ImageError(NOT_SUPPORTED)
    image = Image.open(BytesIO(data), formats=formats)
    check_pixels(image.width, image.height, max_pixels_decoded)
    return image


def check_pixels(width: int, height: int, max_pixels_decoded: int) -> None:
    """Raises ImageError, which names size and limit, if `width * height` exceeds `max_pixels_decoded`."""
    if width * height > max_pixels_decoded:
        raise ImageError(f"image has {width}x{height} = {width * height} pixels, the limit is {max_pixels_decoded}")


def _upright_rgb(image: Image.Image) -> Image.Image:
    # Decode first: the next step ignores errors, as vLLM does, and Pillow raises a decoder's error only once, so that
    # it would be lost and a partly decoded image returned.
    image.load()
    # As vLLM does: an image whose orientation cannot be read or written back is not rotated.
    with contextlib.suppress(Exception):
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":  # a transparent colour of an RGB image (tRNS) is ignored, as vLLM does
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, (255, 255, 255))
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _upright_size(image: Image.Image, data: bytes) -> tuple[int, int]:
    """Returns the size after orientation, found by orienting a 2x1 stand-in image with the same metadata."""
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2:
        return width, height  # Pillow's TIFF reader states the upright size
    stand_in = Image.new("L", (2, 1))
    stand_in.info = dict(image.info)
    if data.startswith(_PNG_SIGNATURE):
        stand_in.info.update(_late_png_metadata(data, animated=bool(getattr(image, "is_animated", False))))
    with contextlib.suppress(Exception):
        stand_in = ImageOps.exif_transpose(stand_in)
    return (width, height) if stand_in.size == (2, 1) else (height, width)


def _late_png_metadata(data: bytes, *, animated: bool) -> dict[str | tuple[int, int], object]:
    """Returns the metadata that follows a PNG's pixels, where ExifTool writes it, without decoding the pixels."""
    late = []
    in_pixels = False
    position = len(_PNG_SIGNATURE)
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IEND" or (kind == b"fcTL" and animated and in_pixels):
            break
        if kind == b"IDAT":
            in_pixels = True
        elif in_pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            late.append(_png_chunk(kind, data[position + 8 : position + 8 + length]))
        position += length + 12
    if not late:
        return {}
    ihdr = _png_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return dict(
        Image.open(BytesIO(_PNG_SIGNATURE + ihdr + b"".join(late) + _png_chunk(b"IDAT", b"")), formats=("PNG",)).info
    )


def _png_chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


@functools.cache
def _ignore_pillow_warnings() -> None:
    """Pillow warns of damaged files, at times thousands of times a file. `warnings.catch_warnings` is no alternative:
    threads that leave it in another order than they entered it would install its filters for the whole process."""
    warnings.filterwarnings("ignore", module=r"PIL\b")


@contextlib.contextmanager
def _client_safe() -> Iterator[None]:
    """Converts Pillow's exceptions to ImageError with a fixed text, and suppresses its warnings."""
    _ignore_pillow_warnings()
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError(NOT_SUPPORTED) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"image has too many pixels, the limit is {MAX_PIXELS_DECODED}") from error
    except Exception as error:  # decoders raise arbitrary exceptions on malformed data
        raise ImageError("image data is truncated or corrupt") from error
