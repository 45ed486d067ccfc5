"""Pipelines batches through the device: staging, run and fetch of successive batches overlap.

A callback runs the patches of a batch between staging and fetch. At most two batches are in flight: the caller waits
while the device computes one and the next is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.images.decoded import Decoded
from encoder.images.size import Grid, num_tokens
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import RunRecord
from encoder.pixels.preprocess import Pixels
from encoder.staging.staging import HostAllocator, Staged, Staging
from encoder.staging.streams import Mark

PLANNED_TOGETHER = 256
"""Images that are packed together at most: the time that packing takes grows with the square of their number."""

Run = Callable[[Tensor, Sequence[Grid], int | None], Tensor]
"""`(patches, grids, budget) -> [sum of num_tokens, width]`; the caller owns the result."""


@dataclass(frozen=True)
class Launched:
    """A batch launched on the device. Call exactly one of `fetch` and `on_device`, once."""

    batch: Batch
    outputs: Tensor
    num_tokens: tuple[int, ...]
    """Tokens of each image."""
    ready: Mark
    staging: Staging
    staged: Staged
    run_record: RunRecord | None = None
    """Record of the run, if the encoder has set it."""

    def fetch(self, allocate: HostAllocator | None = None) -> list[Tensor]:
        """Copies the images' tokens to host memory, `[num_tokens, width]` each, from `allocate` if it returns memory.

        Blocks. Only one thread may fetch; it need not be the launching thread.
        """
        return self.staging.fetch(self.outputs, self.num_tokens, self.ready, allocate)

    def on_device(self) -> list[Tensor]:
        """Returns the images' tokens on the device, `[num_tokens, width]` each, ordered after the compute lane."""
        self.staged.copies_done.wait()  # then the images may be freed; rarely blocks when another batch is ahead
        parts = torch.split(self.outputs, list(self.num_tokens))
        # Copies: a view of one image would keep the whole batch alive.
        return [part.clone() for part in parts] if len(parts) > 1 else [self.outputs]


class Pipeline:
    """Pipeline of one device. Call `launch` from one thread."""

    def __init__(
        self, staging: Staging, plan: Callable[[Sequence[Grid]], list[Batch]], run: Run, *, dtype: torch.dtype
    ) -> None:
        """`plan`: packs grids into batches. `dtype`: dtype of the patches passed to `run`."""
        self.staging = staging
        self._plan = plan
        self._run = run
        self._dtype = dtype

    def wait_for_room(self) -> None:
        """Blocks while two batches are in flight. Images collected after it returns make the fullest batches."""
        self.staging.wait_for_room()

    def _plans(self, grids: Sequence[Grid]) -> Iterator[Batch]:
        for start in range(0, len(grids), PLANNED_TOGETHER):
            planned = self._plan(grids[start : start + PLANNED_TOGETHER])
            for batch in sorted(planned, key=lambda planned: min(planned.indices)):
                yield Batch(tuple(start + index for index in batch.indices), batch.budget)

    def launch(self, images: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        """Packs images and yields each batch once it is launched, ordered by its first image.

        PLANNED_TOGETHER images are packed at a time. A batch is launched only when the caller asks for it, after
        consuming the one before. A failed batch leaves the pipeline usable; the caller may retry the images of batches
        that were not yielded.
        """
        merge = self.staging.rules.merge_size
        grids = [image.grid_thw for image in images]
        for batch in self._plans(grids):
            chosen = [grids[index] for index in batch.indices]
            with torch.inference_mode(), self.staging.stage([images[index] for index in batch.indices]) as staged:
                outputs = self._run(staged.patches(dtype=self._dtype), chosen, batch.budget)
                ready = self.staging.lanes.compute.mark()
            counts = tuple(num_tokens(grid, merge) for grid in chosen)
            yield Launched(batch, outputs, counts, ready, self.staging, staged)
