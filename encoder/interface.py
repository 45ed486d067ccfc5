"""Interfaces that all encoders implement: our own towers, `encoder.encoder`, and vLLM's, `deployments/vllm`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from encoder.images.generic_identity import Identity
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import RunCounts, RunRecord
from encoder.staging.staging import HostAllocator

Item = TypeVar("Item", contravariant=True)
"""Prepared input of one image, video or audio."""


class LaunchedBatch(Protocol):
    """A batch launched on the device."""

    @property
    def batch(self) -> Batch: ...
    @property
    def run_record(self) -> RunRecord | None: ...

    def fetch(self, allocate: HostAllocator | None = None) -> list[Tensor]:
        """Returns the items' embeddings `[num_tokens, width]` in host memory, in the order of `batch.indices`.

        Blocks; another thread than the launching one may call it, once.
        """
        ...


class ItemEncoder(Protocol[Item]):
    """An encoder owned by one thread, which packs prepared items into batches and launches them."""

    def launch_batches(self, items: Sequence[Item], /) -> Iterator[LaunchedBatch]:
        """Yields each batch once it is launched. Items of a batch that failed, and of later ones, may be retried."""
        ...

    def wait_for_room(self) -> None:
        """Blocks while the device has enough batches in flight."""
        ...

    def num_to_launch(self, num_tokens: Sequence[int], waiting: int) -> int:
        """Returns how many of the first queued items to launch together; `waiting`: tokens in the whole queue."""
        ...

    def count_tokens(self, item: Item, /) -> int:
        """Returns the visual tokens of an item, which are the cost of encoding it. Any thread may call it."""
        ...

    def idle_step(self) -> bool:
        """Does optional work; called when no item is queued. Returns whether it did any."""
        ...

    @property
    def identity(self) -> Identity: ...
    @property
    def resizes_on_device(self) -> bool:
        """Whether items are decoded images that the device resizes."""
        ...

    @property
    def counts(self) -> RunCounts: ...
