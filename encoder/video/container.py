"""Opens a video file with FFmpeg (PyAV), and lists its frames from the packets, without decoding them."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from encoder.video.bounds import CORRUPT, VideoBounds, VideoError, client_safe
from encoder.video.structure import Format, check_structure

_DEMUXERS = {"mp4": "mov", "webm": "matroska", "gif": "gif"}
_CODECS = {"mp4": ("h264", "hevc"), "webm": ("vp9", "h264"), "gif": ("gif",)}

MAX_STORED_FRAMES = 2**18
"""Maximum number of frames in a file: 72 minutes at 60 frames per second."""


@dataclass(frozen=True)
class StoredFrame:
    """One packet of the video stream; the file's order is that in which they are decoded."""

    pts: int
    """Time at which it is shown, in the stream's time base."""
    seek_time: int
    """Time by which FFmpeg's demuxer seeks it."""
    is_key: bool
    """Whether decoding can start here."""
    is_shown: bool
    """False for frames that only help to decode others, since the file was cut before them."""
    packet: Packet[VideoStream]


@dataclass(frozen=True)
class OpenVideo:
    """The first video stream of a file, with its packets."""

    stream: VideoStream
    container_seconds: float
    """Duration of the longest stream; 0 if the file does not state it."""
    stored: tuple[StoredFrame, ...]

    @cached_property
    def shown(self) -> list[int]:
        """The times (`pts`) of the shown frames, ascending: frame i of the video is shown at `shown[i]`."""
        return sorted(frame.pts for frame in self.stored if frame.is_shown)

    @property
    def fps(self) -> float:
        """Average frame rate, else the one that FFmpeg guesses; 0 if unknown."""
        rate = self.stream.average_rate or self.stream.guessed_rate
        return float(rate) if rate else 0.0

    def key_before(self, place: int) -> int:
        """Returns the place in `stored` of the last key frame at or before `place` that is not shown after it."""
        wanted = self.stored[place].pts
        while place and not (self.stored[place].is_key and self.stored[place].pts <= wanted):
            place -= 1
        return place

    def num_frames(self) -> int:
        """Returns the number of frames as OpenCV counts them for vLLM's loader: as the header states them, or by the
        duration; fewer if a seek to the last frame ends before it."""
        total = self.stream.frames or int(self.container_seconds * self.fps + 0.5)
        at_end, visible = self._seek_to_end(total)
        return visible if at_end and 0 < visible < total - 1 else total

    def _seek_to_end(self, total: int) -> tuple[bool, int]:
        """Follows OpenCV's seek to the last frame: it seeks by time to a key frame before it, and counts from there.

        Returns whether the stream ends there, and the position. Of files with a variable frame rate, the position is
        not the number of frames.
        """
        target = min(int(self.container_seconds * 1e6), total)
        if target <= 1 or not self.shown:
            return False, target
        start, time_base = self.stream.start_time or 0, float(self.stream.time_base or 0)
        keys = [frame for frame in self.stored if frame.is_key]

        def number(pts: int) -> int:
            return int(self.fps * (pts - start) * time_base + 0.5)

        back = 16
        while True:
            goal = start + int(max(target - back, 0) / self.fps / time_base + 0.5)
            key = next((frame for frame in reversed(keys) if frame.seek_time <= goal), self.stored[0])
            place = min(bisect_left(self.shown, key.pts), len(self.shown) - 1)
            position = number(self.shown[place]) - number(self.shown[0])
            if 0 <= position <= target - 1 or target <= back or back >= 2**29:
                break
            back = back * 2 if back < 16 else back * 3 // 2
        left = len(self.shown) - 1 - place
        read = min(left, max(target - 1 - position, 0))
        return read == left, position + read + (1 if 0 <= position <= target - 1 else 0)

    def upright_size(self) -> tuple[int, int]:
        """Returns width and height after the rotation, which FFmpeg states with the first frame, so it is decoded."""
        codec = self.stream.codec_context
        for stored in (*self.stored, None):
            for frame in codec.decode(None if stored is None else stored.packet):
                return (frame.height, frame.width) if frame.rotation % 180 == 90 else (frame.width, frame.height)
        raise VideoError(CORRUPT)


@contextlib.contextmanager
def open_video(data: bytes, kind: Format, bounds: VideoBounds) -> Iterator[OpenVideo]:
    """Opens an MP4, WebM or GIF file. Packets take the memory of the file once more.

    Raises VideoError, also for exceptions of FFmpeg within the context.
    """
    bounds.check_bytes(len(data))
    check_structure(data, kind)
    # FFmpeg decodes frames to find out what the header does not state: the limit holds before they are allocated.
    options = {"max_pixels": str(bounds.max_pixels_per_frame)}
    with client_safe(), av.open(BytesIO(data), "r", format=_DEMUXERS[kind], options=options) as container:
        if not container.streams.video:
            raise VideoError("file has no video stream")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec.name not in _CODECS[kind]:
            raise VideoError(f"video codec is {codec.name!r}; supported in this format: {', '.join(_CODECS[kind])}")
        bounds.check_pixels(codec.width, codec.height)
        codec.options = options
        codec.thread_count = 1
        seconds = (container.duration or 0) / 1e6
        if seconds < 2.5e-5 and stream.duration and stream.time_base:
            seconds = float(stream.duration * stream.time_base)
        if seconds < 0:
            raise VideoError(CORRUPT)
        bounds.check_seconds(seconds)
        stored = tuple(_stored_frames(container, stream))
        if not stored or len({frame.pts for frame in stored}) < len(stored) or len(stored) < stream.frames:
            raise VideoError(CORRUPT)
        yield OpenVideo(stream, seconds, stored)


def _stored_frames(container: InputContainer, stream: VideoStream) -> Iterator[StoredFrame]:
    # A frame of a GIF is drawn over the one before, although its packet is marked as one to start from.
    only_first_is_key = container.format.name == "gif"
    seeks_by_dts = container.format.name.startswith("mov")
    for number, packet in enumerate(container.demux(stream)):
        if packet.size == 0 and packet.dts is None:  # the end, on which decoders return their last frames
            return
        if number == MAX_STORED_FRAMES:
            raise VideoError(f"video has over {MAX_STORED_FRAMES} frames, the limit")
        # Matroska states no decoding times: FFmpeg derives them, but not of the first packets before B-frames.
        time = packet.dts if seeks_by_dts else packet.pts
        if packet.pts is None or time is None or packet.is_corrupt:
            raise VideoError(CORRUPT)
        is_key = packet.is_keyframe and not (only_first_is_key and number)
        yield StoredFrame(packet.pts, time, is_key, not packet.is_discard, packet)
