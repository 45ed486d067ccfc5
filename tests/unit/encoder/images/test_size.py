"""Sizes, grids and headers: arithmetic, the checkpoint's settings in all their spellings, and hostile headers."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from encoder.images.load import FORMATS, load_rgb
from encoder.images.size import (
    MAX_ASPECT_RATIO,
    ImageError,
    ImageHeader,
    ImageRules,
    PixelBounds,
    image_grid,
    num_tokens,
    read_header,
    resized_size,
)
from encoder.images.structure import MAX_JPEG_SCANS
from tests.programs import output_of_python

QWEN3 = ImageRules(patch_size=16, min_pixels=65536, max_pixels=16777216)
rules_of_any_kind = st.sampled_from([ImageRules(), QWEN3, ImageRules(patch_size=3, merge_size=1, min_pixels=1)])


def encoded(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


@given(st.integers(1, 5000), st.integers(1, 5000), rules_of_any_kind)
def test_resized_is_a_multiple_within_bounds(width: int, height: int, rules: ImageRules) -> None:
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        with pytest.raises(ImageError, match=f"image of {width}x{height} has aspect ratio .* the limit is 200"):
            resized_size(width, height, rules)
        return
    new_width, new_height = resized_size(width, height, rules)
    assert new_width % rules.factor == new_height % rules.factor == 0
    assert new_width * new_height >= rules.min_pixels
    assert new_width * new_height <= rules.max_pixels or rules.factor in (new_width, new_height)
    t, h, w = image_grid(width, height, rules)
    assert (t, h * rules.patch_size, w * rules.patch_size) == (1, new_height, new_width)
    assert num_tokens((t, h, w), rules.merge_size) * rules.factor**2 == new_width * new_height


def test_known_sizes() -> None:
    assert resized_size(1024, 768, ImageRules()) == (1036, 756)
    assert image_grid(1024, 1024, QWEN3) == (1, 64, 64)
    assert image_grid(1, 1, QWEN3) == (1, 16, 16)
    assert num_tokens((2, 4, 6), 2) == 12
    assert resized_size(5600, 28, ImageRules()) == (5600, 28)
    with pytest.raises(ImageError, match=r"image of 2001x10 has aspect ratio 200.1, the limit is 200"):
        resized_size(2001, 10, ImageRules())


def test_bounds_replace_the_checkpoints_one_by_one() -> None:
    assert resized_size(640, 640, QWEN3) == (640, 640)
    assert resized_size(640, 640, QWEN3, PixelBounds()) == (640, 640)
    assert resized_size(640, 640, QWEN3, PixelBounds(max_pixels=320 * 320)) == (320, 320)
    assert resized_size(640, 640, QWEN3, PixelBounds(min_pixels=1280 * 1280)) == (1280, 1280)
    assert resized_size(64, 64, QWEN3) == (256, 256)
    assert resized_size(64, 64, QWEN3, PixelBounds(min_pixels=64 * 64)) == (64, 64)
    # Under the checkpoint's minimum: what is larger shrinks, what is smaller still grows to that minimum.
    assert resized_size(640, 640, QWEN3, PixelBounds(max_pixels=128 * 128)) == (128, 128)
    assert resized_size(64, 64, QWEN3, PixelBounds(max_pixels=128 * 128)) == (256, 256)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, None), "min_pixels is 0; it must be an integer of at least 1"),
        ((None, -3), "max_pixels is -3; it must be an integer of at least 1"),
        ((None, True), "max_pixels is True; it must be an integer of at least 1"),
        ((None, 1e6), "max_pixels is 1000000.0; it must be an integer of at least 1"),
        (("9", None), "min_pixels is '9'; it must be an integer of at least 1"),
        ((9, 8), "min_pixels is 9; it must not be over max_pixels, 8"),
    ],
)
def test_wrong_bounds(bounds: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixelBounds(*bounds)


# As the checkpoints on the hub write them.
QWEN2_5_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
SAVED_IN_FULL = {
    **QWEN2_5_VL,
    "image_processor_type": "Qwen2_5_VLImageProcessor",
    "size": {"max_pixels": 12845056, "min_pixels": 3136},
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "do_center_crop": None,
    "crop_size": None,
    "data_format": "channels_first",
    "default_to_square": False,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}


def checkpoint(folder: Path, settings: object, name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(settings))
    return folder


def test_rules_from_every_spelling(tmp_path: Path) -> None:
    qwen2 = ImageRules(max_pixels=12845056)
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, QWEN2_5_VL)) == qwen2
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, SAVED_IN_FULL)) == qwen2
    half = (0.5, 0.5, 0.5)
    qwen3 = ImageRules(16, 2, 2, 65536, 16777216, half, half)
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, QWEN3_VL)) == qwen3
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, {})) == ImageRules()
    # The top prevails over `size`, and null is as good as absent.
    both = {
        "size": {"shortest_edge": 1, "longest_edge": 2},
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "resample": None,
    }
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, both)) == qwen2
    only_max = {"max_pixels": 12845056, "min_pixels": None, "size": None}
    assert ImageRules.from_checkpoint(checkpoint(tmp_path, only_max)) == qwen2
    # transformers 5 saves all processors in one file, which prevails where it holds an image processor.
    checkpoint(tmp_path, {"processor_class": "Qwen3VLProcessor"}, "processor_config.json")
    assert ImageRules.from_checkpoint(tmp_path) == qwen2
    checkpoint(tmp_path, {"image_processor": QWEN3_VL}, "processor_config.json")
    assert ImageRules.from_checkpoint(tmp_path) == qwen3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_processor_type", "CLIPImageProcessor"),
        ("image_processor_type", "Qwen2VLImageProcessorPil"),  # another resize
        ("do_resize", False),
        ("do_rescale", False),
        ("do_normalize", False),
        ("do_normalize", 1),
        ("do_center_crop", True),
        ("resample", 2),
        ("data_format", "channels_last"),
        ("size", {"height": 224, "width": 224}),
        ("size", {"shortest_edge": 3136}),
        ("size", 224),
        ("min_pixels", 0),
        ("min_pixels", 12845057),
        ("max_pixels", 1e6),
        ("patch_size", "14"),
        ("merge_size", True),
        ("temporal_patch_size", 0),
        ("image_mean", 0.5),
        ("image_mean", [0.5, 0.5]),
        ("image_std", [0.5, 0, 0.5]),
        ("rescale_factor", 0),
    ],
)
def test_unsupported_settings_name_key_and_value(tmp_path: Path, key: str, value: object) -> None:
    settings = {"min_pixels": 3136, "max_pixels": 12845056, key: value}
    if key == "size":
        settings = {key: value}
    with pytest.raises(ValueError, match=r"^preprocessor_config\.json: ") as caught:
        ImageRules.from_checkpoint(checkpoint(tmp_path, settings))
    assert f"{key} is " in str(caught.value)
    values = value if isinstance(value, list) else [value]
    assert any(repr(one) in str(caught.value) for one in values)


def test_settings_that_are_not_there_or_not_json_objects(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        ImageRules.from_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: it must hold a JSON object"):
        ImageRules.from_checkpoint(checkpoint(tmp_path, [1]))
    checkpoint(tmp_path, {"image_processor": 7}, "processor_config.json")
    with pytest.raises(ValueError, match=r"processor_config\.json: image_processor is 7"):
        ImageRules.from_checkpoint(tmp_path)


def test_rules_travel_as_json() -> None:
    again = ImageRules(**json.loads(json.dumps(dataclasses.asdict(QWEN3))))
    assert again == QWEN3
    assert hash(again) == hash(QWEN3)


@pytest.mark.parametrize("image_format", FORMATS)
def test_header(image_format: str) -> None:
    assert read_header(encoded(Image.new("RGB", (48, 16)), image_format)) == ImageHeader(48, 16, image_format)


@pytest.mark.parametrize("image_format", FORMATS)
def test_header_decodes_nothing(image_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress reads headers; Pillow's own getexif() decodes a whole PNG to look for metadata after the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 8
    data = encoded(
        Image.new("RGB", (48, 16)), image_format, **({"exif": exif} if image_format in ("PNG", "JPEG") else {})
    )

    def refuse(self: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    turned = image_format in ("PNG", "JPEG")
    assert read_header(data) == ImageHeader(*((16, 48) if turned else (48, 16)), image_format)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"hello", b"<svg></svg>", b"%PDF-1.4", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0"]
)
def test_what_is_no_image_is_an_error_fit_for_a_client(data: bytes) -> None:
    for read in (read_header, load_rgb):
        with pytest.raises(
            ImageError, match=r"^(not an image of a supported format|image data is truncated or corrupt)$"
        ):
            read(data)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has next to no pixels."""

    def chunk(kind: bytes, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))

    ihdr = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + ihdr + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
def test_more_pixels_than_allowed_are_refused_by_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ImageFile.ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    for read in (read_header, load_rgb):
        with pytest.raises(ImageError, match=r"image has 200x100 = 20000 pixels, the limit is 19999"):
            read(png_header(200, 100), max_pixels_decoded=19999)
        with pytest.raises(ImageError, match=r"image has 13000x13000 = 169000000 pixels, the limit is 100000000"):
            read(png_header(13000, 13000), max_pixels_decoded=100_000_000)
        with pytest.raises(ImageError, match=r"image has too many pixels, the limit is 178956970"):
            read(png_header(100_000, 100_000))
    assert read_header(png_header(200, 100), max_pixels_decoded=20000).width == 200


def test_pillow_warns_of_no_file_and_threads_leave_the_filters_of_others() -> None:
    """`warnings.catch_warnings`, which this used, puts back another thread's filters where threads overlap: from then
    on the whole process ignored all warnings."""
    program = (
        "import sys, warnings\n"
        "from encoder.images.load import ImageError, _client_safe, read_header\n"
        "warnings.showwarning = lambda message, *_: print('warned:', message)\n"
        "try: read_header(bytes.fromhex(sys.argv[1]), max_pixels_decoded=10**8)\n"
        "except ImageError as error: print(error)\n"
        "filters, first, second = list(warnings.filters), _client_safe(), _client_safe()\n"
        "first.__enter__(), second.__enter__(), first.__exit__(None, None, None), second.__exit__(None, None, None)\n"
        "print(warnings.filters == filters)\n"
        "warnings.warn('of others')\n"
    )
    told = output_of_python(program, png_header(13000, 13000).hex())
    assert told.splitlines() == [
        "image has 13000x13000 = 169000000 pixels, the limit is 100000000",
        "True",
        "warned: of others",
    ]


def test_cut_off_pixels_show_when_decoded() -> None:
    data = encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:900]
    assert read_header(data) == ImageHeader(64, 64, "JPEG")
    with pytest.raises(ImageError, match=r"^image data is truncated or corrupt$"):
        load_rgb(data)


def test_scans_of_a_jpeg_are_bounded() -> None:
    """Each takes as long to decode as all pixels: 15,000 empty ones, of a megabyte, occupied a thread for minutes."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    assert read_header(data + 200 * last) == ImageHeader(64, 64, "JPEG"), "after the end of the image is no scan"
    for between in (b"", b"\xff\x01", b"\xff\xd0", b"\xff\xff"):
        many = data[:-2] + MAX_JPEG_SCANS * (between + last) + b"\xff\xd9"
        for read in (read_header, load_rgb):
            with pytest.raises(ImageError, match=r"^image has too many JPEG scans, the limit is 100$"):
                read(many)


def test_the_ingress_pays_for_no_tensors() -> None:
    """These modules are imported by processes that never touch a tensor; torch alone costs seconds and 200 MB."""
    program = (
        "import sys, encoder.images.size, encoder.packing.greedy, encoder.images.identity, encoder.images.load\n"
        "import encoder.checkpoint.image_rules\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'vllm', 'ray') if name in sys.modules])"
    )
    assert output_of_python(program).strip() == "[]"
