"""`read_header`: what a video's container states, without decoding its frames."""

from __future__ import annotations

from dataclasses import dataclass

from encoder.video import frame_list
from encoder.video.bounds import VideoBounds
from encoder.video.container import open_video
from encoder.video.structure import Format, detect_format


@dataclass(frozen=True)
class VideoHeader:
    """Properties of a video file."""

    format: Format
    codec: str
    """FFmpeg's name, such as "h264"; "jpeg" of a frame list."""
    width: int
    """In pixels, after the rotation that the file asks for."""
    height: int
    num_frames: int
    """As vLLM's loader counts them."""
    num_stored: int
    """Frames that the file holds. A file that estimates its number of frames by its duration may hold fewer."""
    fps: float
    """0 if unknown, as in a frame list."""
    duration_s: float
    """`num_frames / fps`, as in vLLM; 0 if unknown."""


def read_header(data: bytes, bounds: VideoBounds | None = None) -> VideoHeader:
    """Reads the header of a video file, or of a frame list as the bytes of its base64 text.

    It parses hostile data with FFmpeg's demuxers: call it in a process that may crash, with a limit on its memory.
    Raises VideoError.
    """
    bounds = bounds or VideoBounds()
    kind = detect_format(data)
    if kind == "frames":
        bounds.check_bytes(len(data))
        count, width, height = frame_list.first_frame(data, bounds)
        return VideoHeader(kind, "jpeg", width, height, count, count, 0.0, 0.0)
    with open_video(data, kind, bounds) as video:
        width, height = video.upright_size()
        total = video.num_frames()
        duration_s = total / video.fps if video.fps > 0 else 0.0
        bounds.check_seconds(duration_s)
        return VideoHeader(
            kind, video.stream.codec_context.name, width, height, total, len(video.shown), video.fps, duration_s
        )
