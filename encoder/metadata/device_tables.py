"""Arena of the grids' numbers on the device, and the layout of a batch as a small table of offsets into it.

The numbers of a grid (`encoder.metadata.grid_numbers`) are contiguous in an arena of fixed size. The table of a batch
holds the offsets of each image's numbers and rows; `encoder.metadata.expand` expands it to the tower's metadata on the
device. A batch of known grids costs the host one look-up per image and one copy, independent of the number of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.expand import Expand, expand
from encoder.metadata.geometry import Grid, check_grid, num_patches, to_device
from encoder.metadata.grid_numbers import PlacedGrid, grid_numbers, num_columns
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata, expanded_metadata

ARENA_BYTES = 64 * 2**20
"""Holds about 400 grids of 4096 patches for Qwen3-VL, 1,600 for Qwen2.5-VL."""
_MAX_LAYOUTS = 4096


class StaleLayoutError(RuntimeError):
    """A layout was used after its arena had been overwritten."""


@dataclass
class ArenaFill:
    """One generation of the arena's contents. It ends when the arena is full and is overwritten from its start."""

    overwritten: bool = False


@dataclass(frozen=True)
class Layout:
    """A batch of grids whose numbers are in the arena. Ints are on the host.

    Valid until the arena is overwritten, which any call of `GridTables.layout` may do: request it right before its use.
    """

    images: tuple[PlacedGrid, ...]
    """The images' grids, in order."""
    image_tokens: tuple[int, ...]
    num_patches: int
    num_tokens: int
    num_frames: int
    num_windows: int
    max_seqlen: int
    """Patches of the longest frame."""
    table: tuple[tuple[int, ...], ...]
    """Per image, its offset in the arena; per image and for the end, the first patch, and the first window; then the
    frames' borders in patches."""
    fill: ArenaFill = field(compare=False, repr=False)
    """Generation of the arena in which the batch was laid out."""
    _on_device: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_grids(cls, images: Sequence[PlacedGrid], config: VisionConfig, fill: ArenaFill) -> Layout:
        """Returns the layout of `images`, whose numbers are in generation `fill` of the arena."""
        image_tokens = tuple(image.num_tokens for image in images)
        first_patch = (0, *accumulate(tokens * config.merge_unit for tokens in image_tokens))
        first_window = (0, *accumulate(len(image.window_lengths) for image in images))
        frames = [length for image in images for length in image.frame_lengths]
        return cls(
            images=tuple(images),
            image_tokens=image_tokens,
            num_patches=first_patch[-1],
            num_tokens=sum(image_tokens),
            num_frames=len(frames),
            num_windows=first_window[-1],
            max_seqlen=max(frames),
            table=(tuple(image.start for image in images), first_patch, first_window, (0, *accumulate(frames))),
            fill=fill,
        )

    def host_description(self, slots: int) -> Tensor:
        """Returns the table as int32 `[4, description_width(slots)]`, padded.

        Images past the batch have no rows. `slots` is at least the number of images and of frames.
        """
        width = description_width(slots)
        rows = [(*row, *[row[-1] if index else 0] * (width - len(row))) for index, row in enumerate(self.table)]
        return torch.tensor(rows, dtype=torch.int32)

    def device_description(self, slots: int, device: torch.device) -> Tensor:
        """Returns `host_description(slots)` on the device, copied there on the first call. No synchronisation.

        Raises `StaleLayoutError` if the arena has been overwritten.
        """
        if self.fill.overwritten:
            raise StaleLayoutError(
                f"a layout of {len(self.image_tokens)} images points into an arena that was overwritten"
            )
        key = slots, device
        if key not in self._on_device:
            self._on_device[key] = to_device(self.host_description(slots), device)
        return self._on_device[key]

    @property
    def slots(self) -> int:
        """Smallest number of slots that `device_description` accepts."""
        return max(len(self.image_tokens), self.num_frames)


def description_width(slots: int) -> int:
    """Returns the length of a description's row: `slots + 1`, rounded up so that rows begin on 16 bytes."""
    return -(-(slots + 1) // 4) * 4


class GridTables:
    """The arena, and the offset of each grid in it. For one thread and one stream.

    When the arena is full, all grids are dropped and it is filled again. That needs no synchronisation: pending reads
    were queued on the stream before the copies that overwrite their memory.
    """

    def __init__(self, config: VisionConfig, device: torch.device, max_bytes: int = ARENA_BYTES) -> None:
        self.config = config
        self.device = device
        # Not zeroed, so that a CPU provides memory only for the part that holds grids.
        self.arena = torch.empty(max_bytes // 4, dtype=torch.int32, device=device)
        """int32: the numbers of the grids, concatenated."""
        self.hits = 0
        self.misses = 0
        self._placed: dict[Grid, PlacedGrid] = {}
        self._layouts: dict[tuple[Grid, ...], Layout] = {}
        self._fill = ArenaFill()
        self._end = 0

    def layout(self, grid_thw: Sequence[Grid]) -> Layout | None:
        """Returns the layout of a batch, after copying missing grids to the arena; None if the batch exceeds the arena.

        Raises `ValueError` for an invalid grid or an empty batch.
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
        if len(self._layouts) == _MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = Layout.from_grids(images, self.config, self._fill)
        return self._layouts[key]

    def metadata(self, layout: Layout, backend: AttentionBackend, expand: Expand = expand) -> TowerMetadata:
        """Expands the metadata of a batch without padding. No synchronisation.

        Raises `StaleLayoutError` if the arena has been overwritten.
        """
        found = expanded_metadata(
            expand,
            self.arena,
            layout.device_description(layout.slots, self.device),
            self.config,
            backend,
            tokens=layout.num_tokens,
            frames=layout.num_frames,
            windows=layout.num_windows,
            max_seqlen=layout.max_seqlen,
            image_tokens=layout.image_tokens,
        )
        if backend is not AttentionBackend.SDPA:
            return found
        frame_lengths = [length for image in layout.images for length in image.frame_lengths]
        window_lengths = [length for image in layout.images for length in image.window_lengths]
        windows = None if found.windows is None else found.windows.grouped(window_lengths)
        return replace(found, frames=found.frames.grouped(frame_lengths), windows=windows)

    def warm(self, grid_thw: Sequence[Grid]) -> None:
        """Copies the grids to the arena without counting them as misses; stops when the arena is full."""
        for grid in grid_thw:
            if grid not in self._placed and not self._place(grid):
                return

    def _place_all(self, grid_thw: Sequence[Grid]) -> list[PlacedGrid] | None:
        missing = set(grid_thw) - self._placed.keys()
        self.misses += len(missing)
        self.hits += len(grid_thw) - len(missing)
        if not all(self._place(grid) for grid in missing):
            self._reset()
            if not all(self._place(grid) for grid in set(grid_thw)):
                self._reset()
                return None
        return [self._placed[grid] for grid in grid_thw]

    def _reset(self) -> None:
        self._fill.overwritten = True
        self._fill = ArenaFill()
        self._placed, self._layouts, self._end = {}, {}, 0

    def _place(self, grid: Grid) -> bool:
        numbers, placed = grid_numbers(grid, self.config, self._end)
        end = self._end + numbers.numel()
        if end > self.arena.numel():
            return False
        self.arena[self._end : end].copy_(to_device(numbers, self.device))
        self._placed[grid], self._end = placed, end
        return True


def batch_metadata(
    grid_thw: Sequence[Grid],
    config: VisionConfig,
    device: torch.device,
    backend: AttentionBackend,
    expand: Expand = expand,
) -> TowerMetadata:
    """Returns the metadata of one batch, with an arena of its own. No synchronisation.

    `grid_thw`: `(t, h, w)` in patches per image. Raises `ValueError` for an invalid grid or an empty batch.
    """
    for grid in grid_thw:
        check_grid(grid, config.spatial_merge_size)
    # Windows add two numbers per token and one per window, thus at most three per patch.
    numbers = (num_columns(config) + 3) * sum(map(num_patches, grid_thw))
    tables = GridTables(config, device, 4 * numbers)
    layout = tables.layout(grid_thw)
    assert layout is not None
    return tables.metadata(layout, backend, expand)
