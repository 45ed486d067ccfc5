"""Batch after batch through the device: staged, run, and left to be fetched, without waiting for one another.

Between staging and fetching stands whatever runs a batch of patches. Two batches are under way at most, so whoever
feeds this waits while the device has one to compute and one to follow. It must not know of towers, graphs or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encoder.decoded import Decoded
from encoder.image_size import Grid, num_tokens
from encoder.lanes import Mark
from encoder.packing import Batch
from encoder.preprocess import Pixels
from encoder.run_counts import Ran
from encoder.staging import Room, Staged, Staging

Run = Callable[[Tensor, Sequence[Grid], int | None], Tensor]
"""`(patches, grids, budget) -> [sum of num_tokens, width]`, which is the caller's to keep."""


class UnderWay(Protocol):
    """A batch that the device has been given, as whoever waits for it sees it; what stands in for an encoder gives it.

    One of `fetch` and `on_device` is to be called, once.
    """

    @property
    def batch(self) -> Batch: ...

    @property
    def ran(self) -> Ran | None:
        """How it ran, where whoever ran it told."""

    def fetch(self, room: Room | None = None) -> list[Tensor]:
        """As `Launched.fetch`."""

    def on_device(self) -> list[Tensor]:
        """As `Launched.on_device`."""


@dataclass(frozen=True)
class Launched:
    """A batch that the device has been given. One of `fetch` and `on_device` is to be called, once."""

    batch: Batch
    outputs: Tensor
    num_tokens: tuple[int, ...]
    """Of each image."""
    ready: Mark
    staging: Staging
    staged: Staged
    ran: Ran | None = None
    """How it ran, where whoever ran it told."""

    def fetch(self, room: Room | None = None) -> list[Tensor]:
        """The images' tokens in host memory, `[num_tokens, width]` each, of `room` where that has any. Blocks, and may
        be called on another thread, which is then the only one that fetches."""
        return self.staging.fetch(self.outputs, self.num_tokens, self.ready, room)

    def on_device(self) -> list[Tensor]:
        """The same on the device, in the order of the compute lane."""
        self.staged.arrived.wait()  # the images may go now; the copies are long done when there is a batch ahead
        parts = torch.split(self.outputs, list(self.num_tokens))
        # Copies: a view would keep the whole batch alive for as long as somebody keeps one image.
        return [part.clone() for part in parts] if len(parts) > 1 else [self.outputs]


class Pipeline:
    """One device's batches. `launch` is called on one thread."""

    def __init__(
        self, staging: Staging, plan: Callable[[Sequence[Grid]], list[Batch]], run: Run, *, dtype: torch.dtype
    ) -> None:
        """`dtype`: of the patches that `run` is given."""
        self.staging = staging
        self._plan = plan
        self._run = run
        self._dtype = dtype

    def wait_for_room(self) -> None:
        """Blocks while two batches are under way. What is collected after it makes the fullest batches."""
        self.staging.wait_for_room()

    def launch(self, images: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        """Packs, and yields each batch as soon as the device has been given it; that with the first image comes first,
        and so on. No batch is launched before the one ahead of it has been taken up.

        A batch that fails leaves the pipeline usable; the images of batches not yet yielded are the caller's to retry.
        """
        merge = self.staging.rules.merge_size
        grids = [image.grid_thw for image in images]
        for batch in sorted(self._plan(grids), key=lambda planned: min(planned.indices)):
            chosen = [grids[index] for index in batch.indices]
            with torch.inference_mode(), self.staging.stage([images[index] for index in batch.indices]) as staged:
                outputs = self._run(staged.patches(dtype=self._dtype), chosen, batch.budget)
                ready = self.staging.lanes.compute.mark()
            counts = tuple(num_tokens(grid, merge) for grid in chosen)
            yield Launched(batch, outputs, counts, ready, self.staging, staged)
