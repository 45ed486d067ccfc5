"""Video files for tests, made with PyAV; the same arguments give the same frames."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

CODECS = {"mp4": "libx264", "mov": "libx264", "webm": "libvpx-vp9", "gif": "gif"}
FAST = {"libx264": {"preset": "ultrafast"}, "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"}}


@dataclass(frozen=True)
class Clip:
    """A video to be generated."""

    num_frames: int = 30
    rate: Fraction = Fraction(25)
    width: int = 96
    height: int = 64
    container: str = "mp4"
    codec: str = ""
    times_ms: Sequence[int] | None = None
    """Of a variable frame rate: when each frame is shown."""
    rotation: int | None = None
    pixel_format: str = "yuv420p"
    colours: tuple[int, int, int] | None = None
    """FFmpeg's numbers of the colour space, the primaries and the transfer that the file states."""
    options: dict[str, str] = field(default_factory=dict)
    sound_s: float = 0.0
    seed: int = 0
    block: int = 8
    """Side of the picture's squares of one colour: towers with random weights hardly tell pictures of small ones
    apart."""

    def pictures(self) -> list[NDArray[np.uint8]]:
        """Frames `[height, width, 3]`: a drifting picture with a square that tells one frame from the next."""
        rng = np.random.default_rng(self.seed)
        block = self.block
        coarse = rng.integers(0, 256, (self.height // block + 1, self.width // block + 1, 3), dtype=np.uint8)
        picture = np.kron(coarse, np.ones((block, block, 1), np.uint8))[: self.height, : self.width]
        frames = []
        for number in range(self.num_frames):
            frame = np.roll(picture, 3 * number, axis=1)
            left = 5 * number % (self.width - 8)
            frame[4:12, left : left + 8] = (number * 37 % 256, number * 11 % 256, 255 - number % 256)
            frames.append(frame)
        return frames

    def encode(self) -> bytes:
        """Returns the file."""
        file = io.BytesIO()
        codec = self.codec or CODECS[self.container]
        with av.open(file, "w", format=self.container) as container:
            stream = container.add_stream(codec, rate=self.rate, options={**FAST.get(codec, {}), **self.options})
            assert isinstance(stream, av.VideoStream)
            stream.width, stream.height = self.width, self.height
            stream.pix_fmt = "rgb8" if codec == "gif" else self.pixel_format
            if self.colours is not None:
                stated = stream.codec_context
                stated.colorspace, stated.color_primaries, stated.color_trc = self.colours
            if self.times_ms is not None:
                stream.codec_context.time_base = Fraction(1, 1000)
            if self.rotation is not None:
                stream.set_display_rotation(self.rotation)
            sound = (
                container.add_stream("aac" if self.container == "mp4" else "libopus", rate=48_000)
                if self.sound_s
                else None
            )
            for number, picture in enumerate(self.pictures()):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts = number if self.times_ms is None else self.times_ms[number]
                frame.time_base = 1 / self.rate if self.times_ms is None else Fraction(1, 1000)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
            if isinstance(sound, av.AudioStream):
                for start in range(0, int(48_000 * self.sound_s), 960):
                    samples = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
                    samples.sample_rate, samples.pts = 48_000, start
                    samples.time_base = Fraction(1, 48_000)
                    container.mux(sound.encode(samples))
                container.mux(sound.encode(None))
        return file.getvalue()


def cut(data: bytes, from_s: float) -> bytes:
    """Copies the packets from the key frame before `from_s`; an edit list hides what is shown before that time."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(file, "w", format="mp4") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        assert stream.time_base is not None
        begin = round(from_s / stream.time_base)
        source.seek(begin, stream=stream)
        for packet in source.demux(stream):
            if packet.dts is None or packet.pts is None:
                continue
            packet.pts, packet.dts = packet.pts - begin, packet.dts - begin
            packet.stream = copy
            target.mux(packet)
    return file.getvalue()


def frame_list(pictures: Sequence[NDArray[np.uint8]]) -> bytes:
    """Returns JPEG files in base64, joined by commas: the data of a `video/jpeg` URL."""
    files = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG")
        files.append(base64.b64encode(file.getvalue()))
    return b",".join(files)


def irregular(num_frames: int, seed: int, low: int = 15, high: int = 120) -> list[int]:
    """Times in milliseconds of a variable frame rate."""
    steps = np.random.default_rng(seed).integers(low, high, num_frames - 1)
    return [0, *np.cumsum(steps).tolist()]
