"""Encoded bytes to an upright RGB image, exactly as vLLM's own image loader gives it; and the size alone, undecoded.

Differences: what Pillow cannot decode without an error is refused, where vLLM may go on with a part of it, and so is a
file with thousands of pieces of metadata (`image_structure.py`).
The ingress reads sizes with `header`, the workers decode with `load_rgb`. It must not know of patches, checkpoints or
tensors, and it needs Pillow only. Every failure is an `ImageError`, whose text may be shown to a client.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from encoder.image_structure import ImageError, check_structure, signature_format

__all__ = ["FORMATS", "ImageError", "ImageHeader", "check_pixels", "header", "load_rgb", "to_rgb"]

DECODING_RULES_VERSION = "1"
"""Part of every digest. Raise it with any change that may alter one decoded or resized pixel."""

MAX_PIXELS_DECODED = 178_956_970
"""Pillow refuses more than this by itself, and it is vLLM's default limit."""

MAX_ICON_PIXELS = 1024 * 1024
"""Pillow decodes an icon while it opens it, so icons have a bound that is cheap enough for the ingress."""

# What vLLM lets Pillow open: readers of still images that work in-process. EPS may start Ghostscript; WMF, BUFR, GRIB
# and HDF5 hand over to other handlers; MPEG cannot be decoded.
FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM", "IMT",
    "IPTC", "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER",
    "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM", "XVTHUMB",
)  # fmt: skip

NOT_SUPPORTED = "not an image of a supported format"

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ICO_SIGNATURE = b"\0\0\1\0"


@dataclass(frozen=True)
class ImageHeader:
    """Width and height in pixels as the image is meant to be seen (after EXIF orientation); Pillow's format name."""

    width: int
    height: int
    format: str


def header(
    data: bytes, *, max_pixels_decoded: int = MAX_PIXELS_DECODED, formats: tuple[str, ...] = FORMATS
) -> ImageHeader:
    """Size and format of an encoded image, without decoding its pixels (icons, which are small, apart).

    Raises ImageError for what is no image of one of the `formats`, which are told by content, for a broken header, or
    for more than `max_pixels_decoded` pixels.
    """
    with _client_safe():
        image = _open(data, max_pixels_decoded, formats)
        width, height = _upright_size(image, data)
        return ImageHeader(width, height, image.format or "")


def load_rgb(
    data: bytes, *, max_pixels_decoded: int = MAX_PIXELS_DECODED, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Decodes `data` to an RGB image: EXIF orientation applied, transparency on white, other modes converted.

    Raises ImageError as `header` does, and for truncated or corrupt data.
    """
    with _client_safe():
        image = _open(data, max_pixels_decoded, formats)
        stated = _upright_size(image, data)
        rgb = _upright_rgb(image)
        # A file within a file (ICNS, BLP) may be larger than the outer header says; work is admitted by what it says.
        if rgb.size != stated:
            raise ImageError("image header states {}x{} pixels, but {}x{} were decoded".format(*stated, *rgb.size))
        return rgb


def to_rgb(image: Image.Image) -> Image.Image:
    """The same for an image that Pillow holds already. The image given is not changed."""
    with _client_safe():
        return _upright_rgb(image)


def _open(data: bytes, max_pixels_decoded: int, formats: tuple[str, ...]) -> Image.Image:
    check_structure(data)
    stated = signature_format(data)
    if stated is not None:
        formats = (stated,) if stated in formats else ()
    if data.startswith(_ICO_SIGNATURE):
        _check_icon(data)
    if not formats:
        raise ImageError(NOT_SUPPORTED)
    image = Image.open(BytesIO(data), formats=formats)
    check_pixels(image.width, image.height, max_pixels_decoded)
    return image


def check_pixels(width: int, height: int, max_pixels_decoded: int) -> None:
    """Raises ImageError, naming size and limit, if `width * height` is over `max_pixels_decoded`."""
    if width * height > max_pixels_decoded:
        raise ImageError(f"image has {width}x{height} = {width * height} pixels, the limit is {max_pixels_decoded}")


def _upright_rgb(image: Image.Image) -> Image.Image:
    # Before the orientation is touched: there vLLM ignores errors, the decoder's too, which Pillow raises only once,
    # and goes on with the part that was decoded.
    image.load()
    # As vLLM does: where the orientation cannot be read or written back, the image stays as it lies.
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
    """Size after orientation: what Pillow does to the image is done to a stand-in of 2x1 with the same metadata."""
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
    """What Pillow will find after a PNG's pixels (ExifTool writes there), without decoding them."""
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


def _check_icon(data: bytes) -> None:
    """Refuses an icon that holds more pixels than its kind can need, before Pillow decodes it.

    Pillow takes an entry of the largest stated size, where 0 means 256. What cannot be read here it cannot decode.
    """
    (count,) = struct.unpack_from("<H", data, 4)
    entries = [struct.unpack_from("<BB10xI", data, 6 + 16 * index) for index in range(count)]
    areas = [(width or 256) * (height or 256) for width, height, _ in entries]
    for offset in (offset for (_, _, offset), area in zip(entries, areas, strict=True) if area == max(areas)):
        start = data[offset : offset + 24]
        width = height = 0
        if start.startswith(_PNG_SIGNATURE):
            if len(start) < 24 or start[12:16] != b"IHDR":
                raise ImageError("icon holds a PNG image without a leading header")
            width, height = struct.unpack(">II", start[16:24])
        elif len(start) == 24 and start.startswith(b"\x0c\0\0\0"):
            width, height = struct.unpack("<HH", start[4:8])
        elif len(start) == 24 and struct.unpack("<I", start[:4])[0] in (40, 52, 56, 64, 108, 124):
            width, height = map(abs, struct.unpack("<ii", start[4:12]))
        if width * height > 2 * MAX_ICON_PIXELS:  # a bitmap in an icon states twice its height, for the mask
            raise ImageError(f"icon holds an image of {width}x{height} pixels, the limit is {MAX_ICON_PIXELS}")


@contextlib.contextmanager
def _client_safe() -> Iterator[None]:
    """Turns whatever Pillow raises into an ImageError with a text of our own, and keeps its warnings out of the log,
    of which a file may cause thousands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise ImageError(NOT_SUPPORTED) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"image has too many pixels, the limit is {MAX_PIXELS_DECODED}") from error
    except Exception as error:  # decoders answer hostile bytes with exceptions of every kind
        raise ImageError("image data is truncated or corrupt") from error
