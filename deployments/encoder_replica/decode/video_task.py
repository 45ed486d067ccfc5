"""Video files in decode workers: a task reads the header, others decode and resize chunks of the frames that were
chosen by it.

Frames are resized in the worker also for a device that resizes images: resized frames have a bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.video.bounds import VideoBounds
from encoder.video.decode import Frames, decode_chunks
from encoder.video.header import read_header
from encoder.video.size import VideoChunk

if TYPE_CHECKING:  # a process that only decodes does without torch
    from encoder.pixels.preprocess import Pixels


@dataclass(frozen=True)
class HeaderTask:
    """A video whose header is to be read."""

    data: bytes
    bounds: VideoBounds

    def run(self) -> list[bytes | memoryview]:
        """Returns the VideoHeader as JSON."""
        return [msgspec.json.encode(read_header(self.data, self.bounds))]


@dataclass(frozen=True)
class ChunkTask:
    """Frames of a video to decode and resize."""

    data: bytes
    """Empty if the worker has the file from the task before."""
    bounds: VideoBounds
    indices: tuple[int, ...]
    """Indices in the file of all frames of the video."""
    chunk: VideoChunk
    offset: int
    """Offset in shared memory at which the frames are stored."""
    num_bytes: int
    """Bytes allocated there; 0 if the frames are sent through the pipe."""

    @property
    def is_last(self) -> bool:
        return self.chunk.first_frame + self.chunk.num_frames >= len(self.indices)


class FrameReader:
    """The video that a worker decodes: chunks that follow each other are decoded in one pass."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._data = b""
        self._frames: Iterator[Frames] = iter(())
        self._next: int | None = None
        """First frame of the next chunk of `_frames`."""

    def run(self, task: ChunkTask, resize: Callable[[Decoded, ImageRules], Pixels]) -> NDArray[np.uint8]:
        """Returns the resized frames. Raises VideoError."""
        first, count = task.chunk.first_frame, task.chunk.num_frames
        if task.data or first != self._next:
            self._data = task.data or self._data
            self._frames = decode_chunks(self._data, task.indices[first:], count, task.bounds)
        self._next = None  # until the frames are decoded
        frames = resize(Decoded(next(self._frames), task.chunk.grid_thw), self._rules).values
        self._next = first + count
        if task.is_last:  # the file and its packets are freed
            self._data, self._frames, self._next = b"", iter(()), None
        return frames
