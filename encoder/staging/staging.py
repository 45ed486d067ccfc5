"""Double-buffered copies of batches: image bytes to the device, patches computed there, embeddings back to the host.

While one batch computes, the next is copied in and the previous one is copied out, each on its own lane. A buffer set
is reused when its batch has been computed. Pinned memory is allocated once, at its bound; bytes that do not fit are
copied without it and counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.pixels.device import fill_patches
from encoder.pixels.layout import PixelPlan, plan_pixels, shape_of
from encoder.pixels.preprocess import Pixels
from encoder.staging.streams import Lanes, Mark

MIB = 2**20

HostAllocator = Callable[[int, int, torch.dtype], Tensor | None]
"""`(num_tokens, width, dtype)` -> contiguous host tensor of that shape, or None if no memory is available."""


@dataclass(frozen=True)
class StagingBounds:
    """Memory bounds of `Staging`."""

    pinned_bytes: int = 128 * MIB
    """Pinned host memory: a quarter for each of the two buffer sets and each of the two outgoing buffers."""
    max_kept_bytes: int = 256 * MIB
    """Device memory that a buffer set keeps between batches; a larger batch gets a temporary buffer."""


@dataclass
class StagingCounts:
    """Counts since start-up."""

    batches: int = 0
    bytes_direct: int = 0
    """Bytes copied to the device directly from the images' own memory."""
    bytes_pinned: int = 0
    """Bytes copied to the device through the sets' pinned memory."""
    bytes_unpinned: int = 0
    """Bytes copied to the device while the host waits, since they did not fit the pinned memory."""
    bytes_fetched_direct: int = 0
    """Bytes copied from the device directly to the embeddings' destination."""
    bytes_fetched_pinned: int = 0
    """Bytes copied from the device to pinned memory, and from there by the host."""
    oversized: int = 0
    """Batches larger than `StagingBounds.max_kept_bytes`."""


@dataclass
class _BufferSet:
    host: Tensor
    device: Tensor | None = None
    busy: list[Mark] = field(default_factory=list)
    """Marks that must pass before the set is reused."""


@dataclass
class Staged:
    """A batch whose copies to the device are queued. A context manager: the buffer set is free for another batch when
    the work queued within the block is done or has failed.
    """

    plan: PixelPlan
    buffer: Tensor
    control: Tensor
    images: Sequence[Pixels | Decoded]
    """References that keep the images alive until the copies are done."""
    copies_done: Mark
    """Passed when the images are on the device."""
    _staging: Staging
    _buffers: _BufferSet

    def patches(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns `[num_patches, patch_dim]`, computed on the compute lane."""
        staging = self._staging
        compute, rules = staging.lanes.compute, staging.rules
        shape = (self.plan.num_patches, 3 * rules.temporal_patch_size * rules.patch_size**2)
        out = compute.enqueue(lambda: torch.empty(shape, dtype=dtype, device=staging.lanes.device))
        compute.enqueue(lambda: fill_patches(self.plan, self.buffer, self.control, rules, out))
        return out

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.busy.append(self._staging.lanes.compute.mark())


class Staging:
    """Two buffer sets for incoming batches, and two pinned buffers for outgoing embeddings.

    with staging.stage(images) as staged:
        outputs = run(staged.patches())
        ready = staging.lanes.compute.mark()
    embeddings = staging.fetch(outputs, num_tokens, ready)
    """

    def __init__(self, rules: ImageRules, lanes: Lanes, bounds: StagingBounds | None = None) -> None:
        self.rules = rules
        self.lanes = lanes
        self.counts = StagingCounts()
        self._bounds = bounds or StagingBounds()
        quarter = self._bounds.pinned_bytes // 4
        self._sets = itertools.cycle([_BufferSet(lanes.host_buffer(quarter)) for _ in range(2)])
        self._next = next(self._sets)
        self._outgoing = [lanes.host_buffer(quarter) for _ in range(2)]

    def wait_for_room(self) -> None:
        """Blocks until a batch can be staged immediately, that is, until the last batch but one has been computed."""
        for mark in self._next.busy:
            mark.wait()
        self._next.busy.clear()

    @torch.inference_mode()
    def stage(self, images: Sequence[Pixels | Decoded]) -> Staged:
        """Queues the copies of a batch, after `wait_for_room`. Patches are in the images' order.

        Raises:
            ValueError: there is no image, or a grid is invalid.
        """
        if not images:
            raise ValueError("images is empty: a batch needs at least one image")
        shapes = [shape_of(image) for image in images]
        plan = plan_pixels(shapes, [image.grid_thw for image in images], self.rules)
        self.wait_for_room()
        used, copy_in = self._next, self.lanes.copy_in
        try:
            buffer = self._device_buffer(used, plan.buffer_bytes + plan.control.nbytes + 8)
            # The tables follow the images, aligned for int64.
            start = -(-plan.buffer_bytes // 8) * 8
            control = buffer[start : start + plan.control.nbytes]
            pieces = [(control, torch.from_numpy(plan.control))]
            for placed, image in zip(plan.placed, images, strict=True):
                flat = torch.from_numpy(image.values).reshape(-1)
                pieces.append((buffer[placed.offset : placed.offset + flat.numel()], flat))
            self._copy_in(pieces, used.host)
            copies_done = copy_in.mark()
            self.lanes.compute.wait_for(copies_done)
        finally:
            # After a failure too: its copies precede later ones on the same lane, so they overwrite nothing.
            self._next = next(self._sets)
        self.counts.batches += 1
        return Staged(plan, buffer, control, images, copies_done, self, used)

    def _device_buffer(self, used: _BufferSet, num_bytes: int) -> Tensor:
        """Returns the set's buffer, reallocated if too small or above `max_kept_bytes`.

        It is allocated on the lane that first writes to it.
        """
        if used.device is not None and used.device.numel() > self._bounds.max_kept_bytes:
            used.device = None
        if used.device is None or used.device.numel() < num_bytes:
            used.device = None
            used.device = self.lanes.copy_in.enqueue(
                lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.lanes.device)
            )
            self.counts.oversized += num_bytes > self._bounds.max_kept_bytes
        return used.device

    def _copy_in(self, pieces: Sequence[tuple[Tensor, Tensor]], host: Tensor) -> None:
        """Copies each source to its target: directly, through pinned memory, or while the host waits."""
        copy_in, filled = self.lanes.copy_in, 0
        for target, source in pieces:
            count = source.numel()
            if self.lanes.is_pinned(source):
                self.counts.bytes_direct += count
            elif filled + count <= host.numel():
                through = host[filled : filled + count].copy_(source)
                copy_in.enqueue(partial(target.copy_, through, non_blocking=True))
                filled += count
                self.counts.bytes_pinned += count
                continue
            else:
                self.counts.bytes_unpinned += count
            copy_in.enqueue(partial(target.copy_, source, non_blocking=True))

    @torch.inference_mode()
    def fetch(
        self, outputs: Tensor, num_tokens: Sequence[int], ready: Mark, allocate: HostAllocator | None = None
    ) -> list[Tensor]:
        """Copies the images' tokens to separate host tensors `[num_tokens[i], width]`. Blocks until they are complete.

        `outputs`: `[sum of num_tokens, width]` on the device, contiguous, complete when `ready` is done. If `allocate`
        returns pinned memory for all images, the device writes to it directly; else they pass through pinned buffers:
        the host empties one while the device fills the other. Raises ValueError if one token exceeds a buffer.
        """
        rows, width = outputs.shape
        destinations = [None if allocate is None else allocate(count, width, outputs.dtype) for count in num_tokens]
        results = [
            torch.empty(count, width, dtype=outputs.dtype) if place is None else place
            for count, place in zip(num_tokens, destinations, strict=True)
        ]
        if all(place is not None and self.lanes.is_pinned(place) for place in destinations):
            self.lanes.copy_out.wait_for(ready)
            for result, source in zip(results, torch.split(outputs, list(num_tokens)), strict=True):
                self.lanes.copy_out.enqueue(partial(result.copy_, source, non_blocking=True))
            self.lanes.copy_out.mark().wait()
            self.counts.bytes_fetched_direct += outputs.nbytes
            return results
        self.counts.bytes_fetched_pinned += outputs.nbytes
        row_bytes = width * outputs.element_size()
        each = self._outgoing[0].numel() // row_bytes
        if each == 0:
            raise ValueError(f"a token has {row_bytes} bytes; a pinned buffer holds {self._outgoing[0].numel()}")
        borders = [0, *itertools.accumulate(num_tokens)]
        self.lanes.copy_out.wait_for(ready)
        before: tuple[Tensor, Mark, int] | None = None
        for number, start in enumerate(range(0, rows, each)):
            end = min(start + each, rows)
            source = outputs[start:end]
            target = (
                self._outgoing[number % 2][: (end - start) * row_bytes].view(outputs.dtype).view(end - start, width)
            )
            self.lanes.copy_out.enqueue(partial(target.copy_, source, non_blocking=True))
            copied = self.lanes.copy_out.mark()
            if before is not None:
                _copy_to_images(*before, results, borders)
            before = target, copied, start
        if before is not None:
            _copy_to_images(*before, results, borders)
        return results


def _copy_to_images(rows: Tensor, copied: Mark, start: int, results: Sequence[Tensor], borders: Sequence[int]) -> None:
    """Copies rows, of which the first is row `start` of the batch, from pinned memory to their images' tensors."""
    copied.wait()
    for result, (first, last) in zip(results, itertools.pairwise(borders), strict=True):
        low, high = max(first, start), min(last, start + len(rows))
        if low < high:
            result[low - first : high - first].copy_(rows[low - start : high - start])
