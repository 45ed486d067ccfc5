"""Bounds on a video, and the error for a video that cannot be used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.images.structure import ImageError

if TYPE_CHECKING:
    from configs.schema import VideoConfig

CORRUPT = "video data is truncated or corrupt"


class VideoError(ImageError):
    """A video cannot be used. The text states the reason and is safe to show to a client: no addresses, no paths."""


@dataclass(frozen=True)
class VideoBounds:
    """An operator's bounds on one video. The caller bounds the time and, with the process's limit, the memory."""

    max_bytes: int = 64 * 1024**2
    """Size of the file."""
    max_seconds: float = 3600.0
    """Duration as its header states it."""
    max_frames: int = 768
    """Frames decoded, after sampling."""
    max_pixels_per_frame: int = 3840 * 2160
    """Width times height."""

    @classmethod
    def of(cls, limits: VideoConfig) -> VideoBounds:
        return cls(limits.max_bytes, limits.max_seconds, limits.max_frames, limits.max_pixels_per_frame)

    def check_bytes(self, num_bytes: int) -> None:
        """Raises VideoError for a file over `max_bytes`."""
        if num_bytes > self.max_bytes:
            raise VideoError(f"video has {num_bytes} bytes, the limit is {self.max_bytes}")

    def check_pixels(self, width: int, height: int) -> None:
        """Raises VideoError for frames without pixels or over `max_pixels_per_frame`."""
        if width < 1 or height < 1:
            raise VideoError(f"video has frames of {width}x{height} pixels")
        if width * height > self.max_pixels_per_frame:
            raise VideoError(
                f"video has frames of {width}x{height} = {width * height} pixels, "
                f"the limit is {self.max_pixels_per_frame}"
            )

    def check_seconds(self, seconds: float) -> None:
        """Raises VideoError for a duration over `max_seconds`."""
        if seconds > self.max_seconds:
            raise VideoError(f"video lasts {seconds:.6g} seconds, the limit is {self.max_seconds:.6g}")

    def check_frames(self, num_frames: int) -> None:
        """Raises VideoError for more than `max_frames` frames to decode."""
        if num_frames > self.max_frames:
            raise VideoError(f"{num_frames} frames of the video were to be decoded, the limit is {self.max_frames}")


@contextlib.contextmanager
def client_safe() -> Iterator[None]:
    """Converts exceptions of demuxers and decoders to VideoError with a fixed text."""
    try:
        yield
    except (VideoError, MemoryError, GeneratorExit):
        raise
    except Exception as error:  # libraries raise arbitrary exceptions on malformed data
        raise VideoError(CORRUPT) from error
