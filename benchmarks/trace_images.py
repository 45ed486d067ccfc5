"""The pictures of a trace: made of its digest and each image's number, and kept in a folder of files.

A picture is a JPEG of blurred noise on a slope of colour, about 0.2 bytes a pixel, as photographs have. The same trace
gives the same pixels on every machine. It must not know what they are for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.trace_requests import Trace, TraceImage

QUALITY = 85
_GRAIN = 8
"""Pixels of the picture for each of the noise."""


def cache_folder() -> Path:
    """Where pictures are kept unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "vitray" / "traces"


def picture(digest: str, image: TraceImage) -> Image.Image:
    """The image `image` of the trace with that digest."""
    chance = np.random.Generator(np.random.PCG64([int(digest[:16], 16), image.id]))
    coarse = chance.integers(0, 256, (-(-image.height // _GRAIN), -(-image.width // _GRAIN), 3), dtype=np.uint8)
    blurred = Image.fromarray(coarse).resize((image.width, image.height), Image.Resampling.BILINEAR)
    slope = np.linspace(0, 1, image.width, dtype=np.float32)[None, :, None] * chance.uniform(0, 1, 3)
    mixed = 0.6 * np.asarray(blurred, dtype=np.float32) + 96 * slope.astype(np.float32)
    return Image.fromarray(mixed.astype(np.uint8))


def make_images(trace: Trace, folder: Path, made: Callable[[int, int], None] = lambda _, __: None) -> dict[int, Path]:
    """A file for each image of the trace, by id, below `folder`; those that are there already stay.

    `made(so_many, of)` is called as files come to be. Raises OSError where the folder cannot be written.
    """
    place = folder / trace.digest[:16]
    place.mkdir(parents=True, exist_ok=True)
    files = {image.id: place / f"{image.id}.jpg" for image in trace.images}
    missing = [image for image in trace.images if not files[image.id].exists()]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow and numpy let others run while they work
        for number, _ in enumerate(threads.map(partial(_write, trace.digest, place), missing), 1):
            made(number, len(missing))
    return files


def _write(digest: str, place: Path, image: TraceImage) -> None:
    """Whole or not at all: another run may look at the same folder."""
    scratch = place / f"{image.id}.{os.getpid()}.part"
    picture(digest, image).save(scratch, "jpeg", quality=QUALITY)
    scratch.replace(place / f"{image.id}.jpg")
