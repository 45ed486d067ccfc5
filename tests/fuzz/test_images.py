"""Image files changed at random: each is an image or an ImageError, and its header says what is decoded."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder.images.load import load_rgb
from encoder.images.size import ImageError, read_header
from tests.fuzz.shares import IN_PROCESS
from tests.hostile import files

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SEEDS = [
    *(files.encoded(files.picture(40, 30), name) for name in FORMATS),
    files.encoded(files.picture(40, 30).quantize(16), "PNG", transparency=3),
    files.encoded(files.picture(40, 30).convert("RGBA"), "WEBP"),
    files.encoded(files.picture(40, 30).convert("CMYK"), "JPEG", progressive=True),
    files.encoded(files.picture(40, 30), "JPEG", exif=files.exif(3)),
    files.encoded(files.picture(8, 8), "GIF", save_all=True, append_images=[files.picture(8, 8, 1)]),
    files.encoded(files.picture(8, 8), "PNG", save_all=True, append_images=[files.picture(8, 8, 1)]),
    files.encoded(files.picture(40, 30), "TIFF", compression="tiff_lzw"),
    files.png_with(files.chunk(b"eXIf", files.exif(3)), files.chunk(b"tEXt", b"Title\0x")),
]
MAX_PIXELS = 1_000_000
# Where, and what is put there: bytes over what was there, bytes between, or nothing for as many as were there.
CHANGE = st.tuples(
    st.sampled_from(("over", "between", "out")),
    st.one_of(st.integers(0, 64), st.integers(0, 5000)),
    st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])),
)


def changed(data: bytes, changes: list[tuple[str, int, bytes]], length: int) -> bytes:
    for kind, wanted, put in changes:
        position = wanted % (len(data) + 1)
        end = position if kind == "between" else position + len(put)
        data = data[:position] + (b"" if kind == "out" else put) + data[end:]
    return data[:length]


def check(data: bytes) -> None:
    try:
        stated = read_header(data, max_pixels_decoded=MAX_PIXELS, formats=FORMATS)
    except ImageError:
        return
    assert 1 <= stated.width * stated.height <= MAX_PIXELS
    try:
        image = load_rgb(data, max_pixels_decoded=MAX_PIXELS, formats=FORMATS)
    except ImageError:
        return
    assert (image.mode, image.size) == ("RGB", (stated.width, stated.height))


def test_changed_files(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["changed files"])
    @given(st.sampled_from(SEEDS), st.lists(CHANGE, min_size=1, max_size=6), st.integers(1, 10_000))
    def fuzz(seed: bytes, changes: list[tuple[str, int, bytes]], length: int) -> None:
        check(changed(seed, changes, length))

    fuzz()


def test_any_bytes_after_a_signature(fuzzing: Callable[[float], settings]) -> None:
    starts = [seed[:length] for seed in SEEDS for length in (3, 8, 12, 33, 100)]

    @fuzzing(IN_PROCESS["any bytes after a signature"])
    @given(st.sampled_from(starts), st.binary(max_size=300))
    @example(b"", b"")
    def fuzz(start: bytes, rest: bytes) -> None:
        check(start + rest)

    fuzz()
