"""Images are loaded as vLLM's own loader loads them: the same bytes of RGB, for every mode and format, and the same
refusals. The sizes that `header` states without decoding are those of the loaded images.

vLLM is the reference here, so the tests need it; images are generated.
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.image import ALLOWED_IMAGE_FORMATS, open_image
from vllm.multimodal.media.image import ImageMediaIO

from encoder.images.load import FORMATS, ImageError, load_rgb, read_header, to_rgb

MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F")
ALL_FORMATS = (*FORMATS, "MPO")  # a JPEG with further pictures behind it, which Pillow names apart


def picture(mode: str, width: int = 37, height: int = 23) -> Image.Image:
    """Gradients and noise in every channel, in any of Pillow's modes."""
    rng = np.random.default_rng(width * 1000 + height)
    y, x = np.mgrid[0:height, 0:width]
    noise = rng.integers(0, 256, (height, width))
    planes = [255 * x / width, 255 * y / height, noise, 255 * (x + y) / (width + height)]
    rgba = Image.fromarray(np.stack(planes, -1).astype(np.uint8), "RGBA")
    if mode == "I;16":
        return Image.fromarray((x * 1700 + y).astype(np.uint16))
    if mode == "I":
        return Image.fromarray((x * 1700 + y).astype(np.int32))
    if mode == "F":
        return Image.fromarray((x * 9.5 - y).astype(np.float32))
    if mode == "PA":
        return rgba.convert("RGB").quantize(32).convert("PA")
    if mode in ("LAB", "HSV", "YCbCr", "CMYK", "P", "1", "L"):
        rgb = rgba.convert("RGB")
        return Image.merge("LAB", rgb.split()) if mode == "LAB" else rgb.convert(mode)
    return rgba.convert(mode)


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def by_vllm(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(ImageMediaIO().load_bytes(data).media)


def assert_as_vllm(data: bytes) -> None:
    expected = by_vllm(data)
    actual = load_rgb(data)
    assert actual.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(actual), expected)
    stated = read_header(data)
    assert (stated.height, stated.width) == expected.shape[:2]


def writable() -> Iterator[tuple[str, str]]:
    """Modes that Pillow writes in a format."""
    for image_format in ALL_FORMATS:
        for mode in MODES:
            try:
                encoded(picture(mode), image_format)
            except (OSError, ValueError, KeyError):
                continue
            yield image_format, mode


WRITABLE = list(writable())


def test_the_matrix_is_as_wide_as_it_claims() -> None:
    """Pillow's writers decide what the tests below see; this list keeps them from shrinking unseen."""
    assert {f for f, _ in WRITABLE} == set(ALL_FORMATS)
    for pair in [
        *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *(("TIFF", mode) for mode in MODES if mode != "HSV"),
        *(("JPEG", mode) for mode in ("1", "L", "RGB", "CMYK", "YCbCr")),
        *(("WEBP", mode) for mode in ("L", "P", "RGB", "RGBA", "CMYK")),
        *(("GIF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(("BMP", mode) for mode in ("1", "L", "P", "RGB", "RGBA")),
    ]:
        assert pair in WRITABLE


@pytest.mark.parametrize(("image_format", "mode"), WRITABLE)
def test_every_mode_of_every_format(image_format: str, mode: str) -> None:
    assert_as_vllm(encoded(picture(mode), image_format))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
def test_exif_orientation(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture("RGB"), image_format, exif=exif)
    assert_as_vllm(data)
    stated = read_header(data)
    assert (stated.width, stated.height) == ((37, 23) if orientation < 5 else (23, 37))


@pytest.mark.parametrize("orientation", [0, 1, 3, 6, 9, 77])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation_with_transparency_and_odd_values(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert_as_vllm(encoded(picture("RGB" if image_format == "JPEG" else "RGBA"), image_format, exif=exif))


XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


@pytest.mark.parametrize("image_format", ["JPEG", "WEBP", "TIFF"])
def test_orientation_in_xmp(image_format: str) -> None:
    options = {"tiffinfo": {700: XMP.encode()}} if image_format == "TIFF" else {"xmp": XMP.encode()}
    data = encoded(picture("RGB"), image_format, **options)
    assert_as_vllm(data)
    assert read_header(data).width == 23


def png_with_chunk(kind: bytes, payload: bytes, *, late: bool) -> bytes:
    """A PNG with one more chunk, right before or right after its pixels."""
    data = encoded(picture("RGB"), "PNG")
    at = data.index(b"IEND") - 4 if late else data.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))
    return data[:at] + chunk + data[at:]


@pytest.mark.parametrize("late", [False, True])
def test_orientation_in_png_chunks(late: bool) -> None:
    """ExifTool writes metadata after the pixels; the header alone would then have width and height the wrong way."""
    exif = Image.Exif()
    exif[0x0112] = 6
    raw_profile = f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n".encode()
    for kind, payload in (
        (b"eXIf", exif.tobytes()[6:]),
        (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode()),
        (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile)),
        (b"tEXt", b"Raw profile type exif\0" + raw_profile),
    ):
        data = png_with_chunk(kind, payload, late=late)
        assert_as_vllm(data)
        assert read_header(data).width == 23, kind


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("payload", [b"", b"MM", b"MM\0*\0\0\0\x08\xff\xff", b"\0" * 40])
def test_unreadable_exif_is_ignored(payload: bytes) -> None:
    for late in (False, True):
        assert_as_vllm(png_with_chunk(b"eXIf", payload, late=late))
    assert_as_vllm(encoded(picture("RGB"), "JPEG", exif=b"Exif\0\0" + payload))


def test_transparency_lies_on_white() -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    assert load_rgb(encoded(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    half = Image.new("LA", (8, 8), (0, 128))
    assert load_rgb(encoded(half, "PNG")).getpixel((0, 0)) == (127, 127, 127)


@pytest.mark.parametrize("transparency", [0, 5, bytes(range(0, 256, 8))])
def test_palette_with_transparency(transparency: int | bytes) -> None:
    indexed = picture("RGB").quantize(32)
    assert_as_vllm(encoded(indexed, "PNG", transparency=transparency))
    if isinstance(transparency, int):
        assert_as_vllm(encoded(indexed, "GIF", transparency=transparency))


def test_transparent_colours_without_alpha() -> None:
    assert_as_vllm(encoded(picture("L"), "PNG", transparency=7))
    assert_as_vllm(encoded(picture("1"), "PNG", transparency=1))
    assert_as_vllm(encoded(picture("RGB"), "PNG", transparency=(0, 0, 0)))
    assert_as_vllm(encoded(picture("I;16"), "PNG", transparency=1700))


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_first_of_several_frames(image_format: str) -> None:
    frames = [picture("RGB"), picture("RGB", 37, 23).transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    assert_as_vllm(encoded(frames[0], image_format, save_all=True, append_images=frames[1:]))


@pytest.mark.parametrize(
    "compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4", "lzma", "zstd"]
)
def test_tiff_compressions(compression: str) -> None:
    assert_as_vllm(encoded(picture("1" if compression == "group4" else "RGB"), "TIFF", compression=compression))


def test_progressive_and_interlaced() -> None:
    assert_as_vllm(encoded(picture("RGB"), "JPEG", progressive=True, subsampling=0, quality=30))
    assert_as_vllm(encoded(picture("RGB"), "WEBP", lossless=True))
    assert_as_vllm(encoded(picture("P"), "GIF", interlace=1))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1), (3, 1), (199, 1)])
def test_smallest_sizes(size: tuple[int, int]) -> None:
    for image_format in FORMATS:
        assert_as_vllm(encoded(picture("RGB", *size), image_format))


def test_formats_are_some_of_vllms() -> None:
    assert set(FORMATS) < set(ALLOWED_IMAGE_FORMATS)
    for other in ("EPS", "AVIF", "ICO", "PPM", "TGA"):
        with pytest.raises(ImageError, match="not an image of a supported format"):
            load_rgb(encoded(picture("RGB", 32, 32), other))


def test_images_that_pillow_holds() -> None:
    for mode in MODES:
        image = picture(mode)
        before = (image.mode, image.size, image.tobytes())
        if mode in ("RGB", "RGBA", "L", "P", "LA", "1", "I;16"):  # what PNG carries over without a change
            np.testing.assert_array_equal(np.asarray(to_rgb(image)), by_vllm(encoded(image, "PNG")))
        assert to_rgb(image).mode == "RGB"
        assert (image.mode, image.size, image.tobytes()) == before


def outcome(load: Any, data: bytes) -> bytes | None:
    try:
        array = np.asarray(load(data))
    except Exception:  # vLLM lets Pillow's own errors of many kinds through
        return None
    return repr(array.shape).encode() + array.tobytes()


TURNED = Image.Exif()
TURNED[0x0112] = 6
SAMPLES = {
    "JPEG turned": encoded(picture("RGB"), "JPEG", exif=TURNED),
    "PNG turned": encoded(picture("RGBA"), "PNG", exif=TURNED),
    "PNG turned late": png_with_chunk(b"eXIf", TURNED.tobytes()[6:], late=True),
    "PNG turned by late XMP": png_with_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.encode(), late=True),
    "TIFF turned": encoded(picture("RGB"), "TIFF", exif=TURNED),
    "WEBP turned": encoded(picture("RGB"), "WEBP", exif=TURNED),
    "JPEG": encoded(picture("RGB"), "JPEG"),
    "PNG": encoded(picture("RGBA"), "PNG"),
    "PNG palette": encoded(picture("P"), "PNG", transparency=3),
    "WEBP": encoded(picture("RGBA"), "WEBP"),
    "GIF": encoded(picture("P"), "GIF"),
    "BMP": encoded(picture("RGB"), "BMP"),
    "TIFF": encoded(picture("RGB"), "TIFF"),
    "TIFF deflate": encoded(picture("RGBA"), "TIFF", compression="tiff_adobe_deflate"),
    "MPO": encoded(picture("RGB"), "MPO", save_all=True, append_images=[picture("L")]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_files_are_taken_or_refused_as_by_vllm(name: str) -> None:
    """Cut off at every tenth of their length, and with a few bytes changed; never anything but an ImageError.

    vLLM loses the decoder's first error and goes on with the part that was decoded; such images are refused here.
    """
    sample = SAMPLES[name]
    damaged = [sample[: len(sample) * tenth // 10] for tenth in range(10)] + [sample[:-1]]
    rng = random.Random(7)
    for _ in range(150):
        changed = bytearray(sample)
        for _ in range(rng.choice((1, 1, 2, 8))):
            # The first bytes, where headers are, get half of the changes.
            changed[rng.randrange(min(64, len(sample)) if rng.random() < 0.5 else len(sample))] = rng.randrange(256)
        damaged.append(bytes(changed))
    refused = 0
    for data in damaged:
        sound = outcome(lambda bytes_: open_image(io.BytesIO(bytes_)), data) is not None
        expected = outcome(lambda bytes_: ImageMediaIO().load_bytes(bytes_).media, data) if sound else None
        assert outcome(load_rgb, data) == expected
        if expected is None:
            refused += 1
            with pytest.raises(ImageError) as caught:
                load_rgb(data)
            assert_safe(str(caught.value))
        else:
            stated = read_header(data)
            assert expected.startswith(repr((stated.height, stated.width, 3)).encode())
    assert refused > 0


def assert_safe(text: str) -> None:
    for leak in ("0x", "/", "\\", "BytesIO", "object at", "Traceback", "PIL"):
        assert leak not in text, text
