"""Makes the pictures of a trace from its digest and each image's number, and caches them in a folder.

A picture is a JPEG of blurred noise on a colour gradient, with about 0.2 bytes per pixel, as photographs have. A trace
has the same pixels on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.trace.requests import Trace, TraceImage

QUALITY = 85
_GRAIN = 8
"""Width and height in pixels of one sample of the noise."""


def cache_folder() -> Path:
    """Returns the default folder for pictures."""
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "vitray" / "traces"


def picture(digest: str, image: TraceImage) -> Image.Image:
    """Returns the picture `image` of the trace with this digest."""
    chance = np.random.Generator(np.random.PCG64([int(digest[:16], 16), image.id]))
    coarse = chance.integers(0, 256, (-(-image.height // _GRAIN), -(-image.width // _GRAIN), 3), dtype=np.uint8)
    blurred = Image.fromarray(coarse).resize((image.width, image.height), Image.Resampling.BILINEAR)
    slope = np.linspace(0, 1, image.width, dtype=np.float32)[None, :, None] * chance.uniform(0, 1, 3)
    mixed = 0.6 * np.asarray(blurred, dtype=np.float32) + 96 * slope.astype(np.float32)
    return Image.fromarray(mixed.astype(np.uint8))


def make_images(trace: Trace, folder: Path, made: Callable[[int, int], None] = lambda _, __: None) -> dict[int, Path]:
    """Makes a file below `folder` for each image of the trace that has none, and returns the files by id.

    `made(so_many, of)` is called after each file. Raises OSError if the folder is not writable.
    """
    place = folder / trace.digest[:16]
    place.mkdir(parents=True, exist_ok=True)
    files = {image.id: place / f"{image.id}.jpg" for image in trace.images}
    missing = [image for image in trace.images if not files[image.id].exists()]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow and numpy release the GIL
        for number, _ in enumerate(threads.map(partial(_write, trace.digest, place), missing), 1):
            made(number, len(missing))
    return files


def _write(digest: str, place: Path, image: TraceImage) -> None:
    """Writes the file atomically, because another run may use the same folder."""
    scratch = place / f"{image.id}.{os.getpid()}.part"
    picture(digest, image).save(scratch, "jpeg", quality=QUALITY)
    scratch.replace(place / f"{image.id}.jpg")
