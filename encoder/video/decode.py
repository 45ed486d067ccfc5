"""Decodes chosen frames of a video, in order and in chunks, so that the first can be encoded while others are decoded.

A frame that cannot be decoded is an error: a damaged file never gives a shorter video.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorTrc, VideoReformatter
from numpy.typing import NDArray

from encoder.video import frame_list
from encoder.video.bounds import VideoBounds, VideoError
from encoder.video.container import OpenVideo, open_video
from encoder.video.structure import detect_format

Frames = NDArray[np.uint8]
"""RGB `[num_frames, height, width, 3]`, upright, contiguous."""

_WIDE_GAMUT = {
    ColorPrimaries.FILM,
    ColorPrimaries.BT2020,
    ColorPrimaries.SMPTE428,
    ColorPrimaries.SMPTE431,
    ColorPrimaries.SMPTE432,
}
_HDR = {ColorTrc.SMPTE2084, ColorTrc.ARIB_STD_B67}


class _PerThread(threading.local):
    """FFmpeg takes a second to prepare the colours of an HDR video, and a reformatter keeps them for the next."""

    def __init__(self) -> None:
        self.reformatter = VideoReformatter()


_thread = _PerThread()


def decode(data: bytes, indices: Sequence[int], bounds: VideoBounds | None = None) -> Frames:
    """Returns the frames at `indices`, which ascend, as `SampledFrames.indices`. Raises VideoError."""
    [frames] = decode_chunks(data, indices, max(1, len(indices)), bounds)
    return frames


def decode_chunks(
    data: bytes,
    indices: Sequence[int],
    frames_per_chunk: int,
    bounds: VideoBounds | None = None,
) -> Iterator[Frames]:
    """Yields the frames at `indices`, `frames_per_chunk` at a time; the last chunk may have fewer.

    Between chunks the decoder keeps its state; frames between key frames that no index needs are not decoded.
    Raises VideoError: for indices that do not ascend or exceed the file, for a frame that cannot be decoded, and for
    frames of different sizes.
    """
    bounds = bounds or VideoBounds()
    bounds.check_frames(len(indices))
    if not indices or frames_per_chunk < 1 or any(a >= b for a, b in pairwise(indices)):
        raise VideoError("indices of frames must ascend, and there must be at least one")
    kind = detect_format(data)
    if kind == "frames":
        bounds.check_bytes(len(data))
        yield from _chunks(frame_list.frames(data, indices, bounds), len(indices), frames_per_chunk)
        return
    with open_video(data, kind, bounds) as video:
        if indices[0] < 0 or indices[-1] >= len(video.shown):
            raise VideoError(f"frame {indices[-1]} was asked for, the video has {len(video.shown)}")
        yield from _chunks(_decoded(video, indices), len(indices), frames_per_chunk)


def _chunks(frames: Iterator[NDArray[np.uint8]], count: int, frames_per_chunk: int) -> Iterator[Frames]:
    shape: tuple[int, ...] = ()
    for start in range(0, count, frames_per_chunk):
        chunk = np.empty(0, np.uint8)
        for place in range(min(frames_per_chunk, count - start)):
            frame = next(frames)
            shape = shape or frame.shape
            if frame.shape != shape:
                raise VideoError("the frames of the video have different sizes")
            if place == 0:
                chunk = np.empty((min(frames_per_chunk, count - start), *shape), np.uint8)
            chunk[place] = frame
        yield chunk


def _decoded(video: OpenVideo, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yields frames `[height, width, 3]`. Decoding starts at the last key frame shown before a frame, or continues."""
    codec = video.stream.codec_context
    place_of = {frame.pts: place for place, frame in enumerate(video.stored)}
    decoded: deque[VideoFrame] = deque()
    following = 0
    for index in indices:
        pts = video.shown[index]
        start = video.key_before(place_of[pts])
        if start > following:
            codec.flush_buffers()
            decoded.clear()
            following = start
        while not decoded or decoded[0].pts is None or decoded[0].pts < pts:
            if decoded:
                decoded.popleft()
            elif following > len(video.stored):
                raise VideoError(f"frame {index} of the video cannot be decoded")
            else:
                packet = video.stored[following].packet if following < len(video.stored) else None
                decoded.extend(codec.decode(packet))
                following += 1
        frame = decoded.popleft()
        if frame.pts != pts or frame.is_corrupt:
            raise VideoError(f"frame {index} of the video cannot be decoded")
        pixels = _pixels(frame)
        yield pixels if frame.rotation % 90 else np.rot90(pixels, frame.rotation // 90)


def _pixels(frame: VideoFrame) -> NDArray[np.uint8]:
    """Converts a frame as OpenCV, and so vLLM, does: HDR and wide colour gamuts to BT.709, other colours unchanged."""
    colours = {}
    primaries, transfer = frame.color_primaries, frame.color_trc
    if primaries in _WIDE_GAMUT or transfer in _HDR:
        colours = {
            "dst_color_primaries": ColorPrimaries.BT709 if primaries in _WIDE_GAMUT else primaries,
            "dst_color_trc": ColorTrc.BT709 if transfer in _HDR else transfer,
        }
    # OpenCV asks for bgr24, whose conversion from more than 8 bits rounds otherwise than that to rgb24.
    is_deep = any(component.bits > 8 for component in frame.format.components)
    rgb_or_bgr = "bgr24" if is_deep else "rgb24"
    converted = _thread.reformatter.reformat(frame, format=rgb_or_bgr, interpolation="BICUBIC", **colours)
    pixels: NDArray[np.uint8] = converted.to_ndarray().view(np.uint8)
    return pixels[..., ::-1] if is_deep else pixels
