"""Which frames of a video a model gets: the indices and timestamps that vLLM's loader and the model's processor choose.

Imports no torch, so that the HTTP ingress can count a video's tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from encoder.checkpoint.video_rules import VideoRules
from encoder.video.bounds import VideoError
from encoder.video.header import VideoHeader

_MAX_FPS = 30
_MIN_FRAMES, _MAX_FRAMES = 4, 768
"""Of vLLM's loaders, whatever the checkpoint's processor has."""
_UNKNOWN_FPS = 24.0
"""Frame rate that Qwen3-VL's processor assumes if the file states none."""


@dataclass(frozen=True)
class SampledFrames:
    """The chosen frames of a video, and what vLLM's processor is told of them."""

    indices: tuple[int, ...]
    """Ascending, each less than `VideoHeader.num_stored`."""
    total_num_frames: int
    fps: float
    """Frame rate of the file."""
    duration_s: float

    def timestamps(self, temporal_patch_size: int) -> list[float]:
        """Returns the seconds of each temporal patch, the mean of its first and last frame, as Qwen3-VL's prompts state
        them. The last frame fills the last patch."""
        padded = [*self.indices, *self.indices[-1:] * (-len(self.indices) % temporal_patch_size)]
        seconds = [index / self.fps for index in padded]
        return [
            (first + last) / 2
            for first, last in zip(
                seconds[::temporal_patch_size], seconds[temporal_patch_size - 1 :: temporal_patch_size], strict=True
            )
        ]

    def seconds_per_grid(self, temporal_patch_size: int) -> float:
        """Returns the seconds that a temporal patch covers, as Qwen2.5-VL's positions use them."""
        return temporal_patch_size / (len(self.indices) / self.total_num_frames * self.fps)


def sample(header: VideoHeader, rules: VideoRules, fps: float | None = None, num_frames: int = 32) -> SampledFrames:
    """Returns the frames that vLLM would give its model.

    Args:
        fps: frames per second to choose, by default 2; of a frame list its rate, by default 1.
        num_frames: most frames that are taken of a frame list; -1 for all.

    Raises VideoError for a video that vLLM's rule cannot sample.
    """
    if header.format == "frames":
        stated = 1.0 if fps is None else float(fps)
        taken = header.num_frames if num_frames < 0 else min(num_frames, header.num_frames)
        return SampledFrames(tuple(range(taken)), taken, stated, taken / stated if stated > 0 else 0.0)
    total, stated = header.num_frames, header.fps
    wanted = min(2.0 if fps is None else fps, _MAX_FPS)
    if rules.loader == "qwen2_vl":
        chosen = _qwen2_vl(total, stated, wanted)
    else:
        stated = stated if stated > 0 else _UNKNOWN_FPS
        chosen = _qwen3_vl(total, stated, wanted, _MIN_FRAMES, _MAX_FRAMES)
    # A file may hold fewer frames than its duration suggests. vLLM skips the missing ones, and reads each index once.
    indices = sorted({index for index in chosen if index < header.num_stored})
    if not indices:
        raise VideoError(f"video has no frame to sample; its header states {total}")
    if len(indices) == total and rules.loader == "qwen3_vl":  # then the processor chooses among all frames
        indices = _qwen3_vl(total, stated, rules.fps, rules.min_frames, rules.max_frames)
    return SampledFrames(tuple(indices), total, stated, header.duration_s)


def _qwen2_vl(total: int, fps: float, wanted_fps: float) -> list[int]:
    """Frames come in pairs."""
    if fps <= 0:
        raise VideoError("video states no frame rate, which the model needs")
    pair = 2
    most = min(_MAX_FRAMES, total) // pair * pair
    count = math.floor(min(max(total / fps * wanted_fps, _MIN_FRAMES), most, total) / pair) * pair
    if count < pair:
        raise VideoError(f"video has {total} frames, the model needs at least {pair}")
    steps = _float32_steps(total, total / count).astype(np.int32)
    return [min(int(index), total - 1) for index in steps]


def _float32_steps(end: int, step: float) -> NDArray[np.float32]:
    """Returns the multiples of `step` below `end` as torch's `arange` rounds them on x86: by eights, each from its
    first, in pairs of eights; those left over one by one."""
    number = np.arange(math.ceil(end / step))
    steps = ((number // 8 * 8 * step).astype(np.float32) + number % 8 * step).astype(np.float32)
    rest = len(number) // 16 * 16
    steps[rest:] = number[rest:] * step
    return steps


def _qwen3_vl(total: int, fps: float, wanted_fps: float, min_frames: int, max_frames: int) -> list[int]:
    count = min(max(int(total / fps * wanted_fps), min_frames), max_frames, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]
