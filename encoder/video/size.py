"""Computes the grid of a video from its size and its number of frames, before a frame is decoded; pure arithmetic.

Results equal those of transformers' video processors of Qwen2.5-VL and Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import dataclass

from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.size import MAX_ASPECT_RATIO, Grid, fit_area, num_tokens
from encoder.video.bounds import VideoError


def video_grid(width: int, height: int, num_frames: int, rules: VideoRules) -> Grid:
    """Returns the grid `(t, h, w)` in patches of `num_frames` sampled frames of `width` x `height` pixels.

    The last frame fills the last temporal patch. Raises VideoError if the longer side is over 200 times the shorter
    one, and for a single frame if the bounds are on all frames together.
    """
    frames = rules.frames
    factor, pair = frames.factor, frames.temporal_patch_size
    together = rules.loader == "qwen3_vl"
    if together and num_frames < pair:
        raise VideoError(f"{num_frames} frame of the video was sampled, the model needs at least {pair}")
    if together and min(width, height) < factor:
        enlarge = max(factor / height, factor / width)
        width, height = int(width * enlarge), int(height * enlarge)
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT_RATIO:
        raise VideoError(f"video of {width}x{height} has aspect ratio {aspect:.6g}, the limit is {MAX_ASPECT_RATIO}")
    counted = (num_frames, round(num_frames / pair) * pair) if together else (1, 1)
    new_width, new_height = fit_area(width, height, factor, frames.min_pixels, _max_pixels(num_frames, rules), counted)
    return -(-num_frames // pair), new_height // frames.patch_size, new_width // frames.patch_size


def _max_pixels(num_frames: int, rules: VideoRules) -> int:
    """Returns the bound on the pixels of a frame, or of all frames together."""
    frames, tokens = rules.frames, rules.max_video_tokens
    if not rules.cap_pixels_per_frame:
        return frames.max_pixels
    least = int(frames.min_pixels * 1.05)
    if rules.loader == "qwen3_vl":
        return num_frames * max(min(tokens * frames.factor**2, frames.max_pixels // num_frames), least)
    all_frames = int(tokens * frames.factor * frames.factor * 0.9)
    return max(min(frames.max_pixels, all_frames * frames.temporal_patch_size // num_frames), least)


@dataclass(frozen=True)
class VideoChunk:
    """Whole temporal patches of a video, encoded apart from the others: attention does not cross temporal patches, so
    the rows are those of the whole video."""

    first_frame: int
    """Place among the sampled frames."""
    num_frames: int
    grid_thw: Grid
    num_tokens: int

    @property
    def frame_range(self) -> tuple[int, int]:
        """First and last of its sampled frames, counted from 1."""
        return self.first_frame + 1, self.first_frame + self.num_frames


def plan_chunks(grid: Grid, num_frames: int, patches_per_chunk: int, rules: ImageRules) -> list[VideoChunk]:
    """Divides a video into chunks of `patches_per_chunk` temporal patches; the last one may be shorter.

    grid: `video_grid` of its `num_frames` sampled frames. Each chunk's frames and grid make a `Decoded` or `Pixels`.
    """
    t, h, w = grid
    pair, per_patch = rules.temporal_patch_size, num_tokens((1, h, w), rules.merge_size)
    chunks = []
    for start in range(0, t, patches_per_chunk):
        count = min(patches_per_chunk, t - start)
        frames = min(count * pair, num_frames - start * pair)
        chunks.append(VideoChunk(start * pair, frames, (count, h, w), count * per_patch))
    return chunks
