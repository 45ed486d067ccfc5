"""Frame lists, `video/jpeg`: image files in base64, joined by commas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pybase64
from numpy.typing import NDArray

from encoder.images.load import ImageError, load_rgb, read_header
from encoder.video.bounds import VideoBounds, VideoError


def first_frame(data: bytes, bounds: VideoBounds) -> tuple[int, int, int]:
    """Returns the number of frames, and width and height of the first. Raises VideoError."""
    try:
        header = read_header(_file(data.partition(b",")[0], 0), max_pixels_decoded=bounds.max_pixels_per_frame)
    except ImageError as error:
        raise VideoError(f"frame 0: {error}") from error
    return data.count(b",") + 1, header.width, header.height


def frames(data: bytes, indices: Sequence[int], bounds: VideoBounds) -> Iterator[NDArray[np.uint8]]:
    """Yields frames `[height, width, 3]`. Raises VideoError for one that cannot be decoded."""
    parts = data.split(b",")
    for index in indices:
        try:
            yield np.asarray(load_rgb(_file(parts[index], index), max_pixels_decoded=bounds.max_pixels_per_frame))
        except ImageError as error:
            raise VideoError(f"frame {index}: {error}") from error


def _file(part: bytes, index: int) -> bytes:
    try:
        return pybase64.b64decode(part, validate=True)
    except ValueError as error:
        raise VideoError(f"frame {index} is not base64") from error
