"""What a tower reads about its grids, kept on the device: a batch is described by a few numbers and laid out there.

The numbers of a grid (positions, taps, window order and borders) lie one after the other in an arena of fixed size. A
batch is a small table that says where its images' numbers are and where their rows begin; `encoder.expansion` makes the
tower's metadata of it on the device. So a batch of known grids costs the host a look-up an image and one copy, however
many patches it has. It must not know towers or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from encoder.geometry import Grid
from encoder.metadata import ImageGeometry, image_geometry, to_device
from encoder.vision_config import VisionConfig

ARENA_BYTES = 64 * 2**20
"""Holds about 400 grids of 4096 patches for Qwen3-VL, 1,600 for Qwen2.5-VL."""
_MOST_LAYOUTS = 4096


@dataclass(frozen=True)
class Layout:
    """A batch of grids whose numbers are in the arena. Ints are on the host."""

    image_tokens: tuple[int, ...]
    num_patches: int
    num_tokens: int
    num_frames: int
    num_windows: int
    max_seqlen: int
    """Patches of the longest frame."""
    table: tuple[tuple[int, ...], ...]
    """Per image its place in the arena, then per image with the end its first patch, and its first window; then the
    frames' borders in patches."""
    _on_device: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def on_host(self, slots: int) -> Tensor:
        """int32 `[4, described_width(slots)]`: the table, each row padded so that images past the batch have no rows.

        `slots` is at least the number of images and of frames.
        """
        width = described_width(slots)
        rows = [(*row, *[row[-1] if index else 0] * (width - len(row))) for index, row in enumerate(self.table)]
        return torch.tensor(rows, dtype=torch.int32)

    def described(self, slots: int, device: torch.device) -> Tensor:
        """The same on the device, copied there once. No synchronisation."""
        key = slots, device
        if key not in self._on_device:
            self._on_device[key] = to_device(self.on_host(slots), device)
        return self._on_device[key]

    @property
    def slots(self) -> int:
        """The fewest that `described` takes."""
        return max(len(self.image_tokens), self.num_frames)


def described_width(slots: int) -> int:
    """Numbers of a row of a description: one more than the slots, rounded up so that rows begin on 16 bytes."""
    return -(-(slots + 1) // 4) * 4


@dataclass(frozen=True)
class _Placed:
    place: int
    """Index of its first number in the arena."""
    num_tokens: int
    frame_lengths: tuple[int, ...]
    num_windows: int


class GridTables:
    """The arena and which grid lies where. For one thread and one stream.

    When it is full, all is forgotten and it fills anew: what the stream still reads was queued before what overwrites
    it.
    """

    def __init__(self, config: VisionConfig, device: torch.device, max_bytes: int = ARENA_BYTES) -> None:
        self.config = config
        self.device = device
        self.arena = torch.zeros(max_bytes // 4, dtype=torch.int32, device=device)
        """int32. Per grid: `columns` numbers a patch, then (with windows) two a token, then one a window."""
        self.columns = 2 + (8 if config.num_position_embeddings else 0)
        """Row and column; then, for towers with a table of positions, four taps and the bits of their weights."""
        self.hits = 0
        self.misses = 0
        self._placed: dict[Grid, _Placed] = {}
        self._layouts: dict[tuple[Grid, ...], Layout] = {}
        self._end = 0

    def layout(self, grid_thw: Sequence[Grid]) -> Layout | None:
        """The batch, its grids' numbers in the arena. None where they need more room than all of it.

        Raises `ValueError` for an impossible grid or none at all.
        """
        if not grid_thw:
            raise ValueError("grid_thw is empty: a tower needs at least one image")
        key = tuple(grid_thw)
        if key in self._layouts:
            self.hits += len(key)
            return self._layouts[key]
        images = self._place_all(grid_thw)
        if images is None:
            return None
        if len(self._layouts) == _MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = self._layout(images)
        return self._layouts[key]

    def _layout(self, images: Sequence[_Placed]) -> Layout:
        image_tokens = tuple(image.num_tokens for image in images)
        first_patch = (0, *accumulate(tokens * self.config.merge_unit for tokens in image_tokens))
        first_window = (0, *accumulate(image.num_windows for image in images))
        frames = [length for image in images for length in image.frame_lengths]
        return Layout(
            image_tokens=image_tokens,
            num_patches=first_patch[-1],
            num_tokens=sum(image_tokens),
            num_frames=len(frames),
            num_windows=first_window[-1],
            max_seqlen=max(frames),
            table=(tuple(image.place for image in images), first_patch, first_window, (0, *accumulate(frames))),
        )

    def warm(self, grid_thw: Sequence[Grid]) -> None:
        """Places the grids without counting them as misses; stops where the arena is full."""
        for grid in grid_thw:
            if grid not in self._placed and not self._place(grid):
                return

    def _place_all(self, grid_thw: Sequence[Grid]) -> list[_Placed] | None:
        missing = set(grid_thw) - self._placed.keys()
        self.misses += len(missing)
        self.hits += len(grid_thw) - len(missing)
        if not all(self._place(grid) for grid in missing):
            self._forget()
            if not all(self._place(grid) for grid in set(grid_thw)):
                self._forget()
                return None
        return [self._placed[grid] for grid in grid_thw]

    def _forget(self) -> None:
        self._placed, self._layouts, self._end = {}, {}, 0

    def _place(self, grid: Grid) -> bool:
        geometry = image_geometry(grid, self.config)
        numbers = _numbers(geometry)
        if self._end + numbers.numel() > self.arena.numel():
            return False
        self.arena[self._end : self._end + numbers.numel()].copy_(to_device(numbers, self.device))
        self._placed[grid] = _Placed(
            self._end, geometry.num_tokens, geometry.frame_lengths, len(geometry.window_lengths)
        )
        self._end += numbers.numel()
        return True


def _numbers(image: ImageGeometry) -> Tensor:
    """int32 `[numbers]` of one grid, as they lie in the arena."""
    rows = [image.rope_positions]
    if image.position_indices is not None and image.position_weights is not None:
        rows += [image.position_indices, image.position_weights.view(torch.int32)]
    parts = [torch.cat(rows, 1).flatten()]
    if image.window_order is not None and image.window_inverse is not None:
        parts.append(torch.stack((image.window_order, image.window_inverse), 1).flatten())
        starts = (0, *accumulate(image.window_lengths[:-1]))
        parts.append(torch.tensor(starts, dtype=torch.int32))
    return torch.cat(parts)
