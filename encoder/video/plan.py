"""What is encoded of a video: its sampled frames and their grid, known from the header before a frame is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from encoder.checkpoint.video_rules import VideoRules
from encoder.images.size import Grid, num_tokens
from encoder.item_header import ItemHeader, VideoFields
from encoder.video.bounds import VideoBounds
from encoder.video.header import VideoHeader
from encoder.video.sampling import SampledFrames, sample
from encoder.video.size import VideoChunk, plan_chunks, video_grid

PATCHES_PER_CHUNK = 4
"""Temporal patches that are encoded and delivered together: two seconds or more of a video."""


@dataclass(frozen=True)
class VideoPlan:
    """Frames of a video and their grid.

    plan = VideoPlan.make(read_header(file), VideoRules.from_checkpoint(path, architecture, image_rules), bounds)
    frames = decode(file, plan.frames.indices, bounds)
    """

    frames: SampledFrames
    grid: Grid
    rules: VideoRules

    @classmethod
    def make(
        cls,
        header: VideoHeader,
        rules: VideoRules,
        bounds: VideoBounds,
        fps: float | None = None,
        num_frames: int | None = None,
    ) -> VideoPlan:
        """`fps`, `num_frames`: the request's, as in vLLM's `media_io_kwargs.video`. Raises VideoError."""
        frames = sample(header, rules, fps, 32 if num_frames is None else num_frames)
        bounds.check_frames(len(frames.indices))
        return cls(frames, video_grid(header.width, header.height, len(frames.indices), rules), rules)

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding."""
        return num_tokens(self.grid, self.rules.frames.merge_size)

    @property
    def chunks(self) -> list[VideoChunk]:
        return plan_chunks(self.grid, len(self.frames.indices), PATCHES_PER_CHUNK, self.rules.frames)

    def header(self, digest: str) -> ItemHeader:
        """Returns the item header, whose prompt and positions equal those of vLLM's processor for the checkpoint."""
        pair = self.rules.frames.temporal_patch_size
        if self.rules.loader == "qwen3_vl":
            fields = VideoFields(self.grid, tuple(self.frames.timestamps(pair)))
        else:
            fields = VideoFields(self.grid, seconds_per_grid=self.frames.seconds_per_grid(pair))
        rows = tuple(chunk.num_tokens for chunk in self.chunks)
        return ItemHeader(digest, "video", self.num_tokens, (), fields, rows)
