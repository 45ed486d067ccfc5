"""Batches on their way to the device and back: bytes in, patches there, embeddings out, through two sets of buffers.

While one batch computes, the next is copied in and the one before is copied out, each on a lane of its own. A set is
used again when the batch that used it has been computed. Pinned memory is allocated once, at its bound; what does not
fit is copied without it, which is counted. It must not know of towers, queues or threads' purposes: one thread stages,
and one, maybe another, fetches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from encoder.bicubic import TapCache
from encoder.decoded import Decoded
from encoder.device_pixels import fill_patches
from encoder.image_rules import ImageRules
from encoder.lanes import Lanes, Mark
from encoder.pixel_plan import PixelPlan, is_planar, plan_pixels, shape_of
from encoder.preprocess import Pixels

MIB = 2**20

Room = Callable[[int, int, torch.dtype], Tensor | None]
"""`(num_tokens, width, dtype)` -> host memory of that shape, contiguous, or None where there is none."""


@dataclass(frozen=True)
class StagingBounds:
    """In bytes."""

    pinned: int = 128 * MIB
    """Of host memory: a quarter for each of the two sets, a quarter for each of the two pieces on their way out."""
    kept: int = 256 * MIB
    """Of device memory that a set keeps between batches; a batch that needs more gets it for once."""
    taps: int = 16 * MIB
    """Of weights for resizing that are remembered."""


@dataclass
class StagingCounts:
    """What happened so far."""

    batches: int = 0
    bytes_direct: int = 0
    """Copied to the device straight from where the images lay."""
    bytes_pinned: int = 0
    """Copied through the sets' pinned memory."""
    bytes_unpinned: int = 0
    """Copied with the host waiting, for want of pinned memory."""
    bytes_fetched_direct: int = 0
    """Copied from the device straight to where the embeddings are to lie."""
    bytes_fetched_pinned: int = 0
    """Copied from the device to pinned memory, and from there by the host."""
    oversized: int = 0
    """Batches whose bytes were more than a set keeps."""


@dataclass
class _Set:
    host: Tensor
    device: Tensor | None = None
    busy: list[Mark] = field(default_factory=list)
    """What must have passed before the set is used again."""


@dataclass
class Staged:
    """A batch whose bytes are on their way to the device. Use as a context: the set is free for another batch when the
    work that was given inside is done, or when it failed."""

    plan: PixelPlan
    buffer: Tensor
    control: Tensor
    images: Sequence[Pixels | Decoded]
    """Held until the copies are done."""
    arrived: Mark
    """Behind the copies."""
    _staging: Staging
    _set: _Set

    def patches(self, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """`[num_patches, patch_dim]` on the compute lane: `out`, such as a graph's own buffer, or a new tensor."""
        staging = self._staging
        compute, rules = staging.lanes.compute, staging.rules
        if out is None:
            shape = (self.plan.num_patches, 3 * rules.temporal_patch_size * rules.patch_size**2)
            out = compute.do(lambda: torch.empty(shape, dtype=dtype, device=staging.lanes.device))
        target = out
        compute.do(lambda: fill_patches(self.plan, self.buffer, self.control, rules, target))
        return target

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self._set.busy.append(self._staging.lanes.compute.mark())


class Staging:
    """Two sets of buffers for batches that come in, and two pieces of pinned memory for embeddings that go out."""

    def __init__(self, rules: ImageRules, lanes: Lanes, bounds: StagingBounds | None = None) -> None:
        self.rules = rules
        self.lanes = lanes
        self.counts = StagingCounts()
        self._bounds = bounds or StagingBounds()
        quarter = self._bounds.pinned // 4
        self._sets = itertools.cycle([_Set(lanes.host_buffer(quarter)) for _ in range(2)])
        self._next = next(self._sets)
        self._pieces = [lanes.host_buffer(quarter) for _ in range(2)]
        self._taps = TapCache(self._bounds.taps)

    def wait_for_room(self) -> None:
        """Blocks until a batch can be staged at once: until the batch before the last has been computed."""
        for mark in self._next.busy:
            mark.wait()
        self._next.busy.clear()

    @torch.inference_mode()
    def stage(self, images: Sequence[Pixels | Decoded]) -> Staged:
        """Starts the copies of a batch, after `wait_for_room`. Patches are in the images' order.

        Raises:
            ValueError: no image, or a grid that cannot be.
        """
        if not images:
            raise ValueError("there is no image to stage")
        planar = [is_planar(image) for image in images]
        shapes = [shape_of(image.values, planar=each) for image, each in zip(images, planar, strict=True)]
        plan = plan_pixels(shapes, [image.grid_thw for image in images], self.rules, self._taps)
        self.wait_for_room()
        used, copy_in = self._next, self.lanes.copy_in
        try:
            buffer = self._device_buffer(used, plan.buffer_bytes + plan.control.nbytes + 8)
            # The tables behind the images, where 64-bit numbers may lie.
            start = -(-plan.buffer_bytes // 8) * 8
            control = buffer[start : start + plan.control.nbytes]
            pieces = [(control, torch.from_numpy(plan.control))]
            for placed, image in zip(plan.placed, images, strict=True):
                flat = torch.from_numpy(image.values).reshape(-1)
                pieces.append((buffer[placed.offset : placed.offset + flat.numel()], flat))
            self._copy_in(pieces, used.host)
            arrived = copy_in.mark()
            self.lanes.compute.after(arrived)
        finally:
            # After a failure too. Its copies come before the next ones on their lane, so they can spoil nothing.
            self._next = next(self._sets)
        self.counts.batches += 1
        return Staged(plan, buffer, control, images, arrived, self, used)

    def _device_buffer(self, used: _Set, num_bytes: int) -> Tensor:
        """The set's buffer, grown where it is too small; memory of the lane that first writes to it."""
        if used.device is not None and used.device.numel() > self._bounds.kept:
            used.device = None
        if used.device is None or used.device.numel() < num_bytes:
            used.device = None
            used.device = self.lanes.copy_in.do(
                lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.lanes.device)
            )
            self.counts.oversized += num_bytes > self._bounds.kept
        return used.device

    def _copy_in(self, pieces: Sequence[tuple[Tensor, Tensor]], host: Tensor) -> None:
        """Copies each source to its target: straight, through the pinned memory, or with the host waiting."""
        copy_in, filled = self.lanes.copy_in, 0
        for target, source in pieces:
            count = source.numel()
            if self.lanes.direct(source):
                self.counts.bytes_direct += count
            elif filled + count <= host.numel():
                through = host[filled : filled + count].copy_(source)
                copy_in.do(partial(target.copy_, through, non_blocking=True))
                filled += count
                self.counts.bytes_pinned += count
                continue
            else:
                self.counts.bytes_unpinned += count
            copy_in.do(partial(target.copy_, source, non_blocking=True))

    @torch.inference_mode()
    def fetch(self, outputs: Tensor, num_tokens: Sequence[int], ready: Mark, room: Room | None = None) -> list[Tensor]:
        """The images' tokens in host memory of their own, `[num_tokens[i], width]` each. Blocks until they are there.

        `outputs` `[sum of num_tokens, width]` on the device, contiguous, computed once `ready` has passed. Where all of
        them find `room` that the device copies to by itself, it does; else the host copies one piece while the device
        copies the next.
        """
        rows, width = outputs.shape
        given = [None if room is None else room(count, width, outputs.dtype) for count in num_tokens]
        results = [
            torch.empty(count, width, dtype=outputs.dtype) if place is None else place
            for count, place in zip(num_tokens, given, strict=True)
        ]
        if all(place is not None and self.lanes.direct(place) for place in given):
            self.lanes.copy_out.after(ready)
            for result, source in zip(results, torch.split(outputs, list(num_tokens)), strict=True):
                self.lanes.copy_out.do(partial(result.copy_, source, non_blocking=True))
            self.lanes.copy_out.mark().wait()
            self.counts.bytes_fetched_direct += outputs.nbytes
            return results
        self.counts.bytes_fetched_pinned += outputs.nbytes
        row_bytes = width * outputs.element_size()
        each = self._pieces[0].numel() // row_bytes
        if each == 0:
            raise ValueError(f"a token has {row_bytes} bytes, a piece of pinned memory {self._pieces[0].numel()}")
        borders = [0, *itertools.accumulate(num_tokens)]
        self.lanes.copy_out.after(ready)
        before: tuple[Tensor, Mark, int] | None = None
        for number, start in enumerate(range(0, rows, each)):
            end = min(start + each, rows)
            source = outputs[start:end]
            target = self._pieces[number % 2][: (end - start) * row_bytes].view(outputs.dtype).view(end - start, width)
            self.lanes.copy_out.do(partial(target.copy_, source, non_blocking=True))
            arrived = self.lanes.copy_out.mark()
            if before is not None:
                _unload(*before, results, borders)
            before = target, arrived, start
        if before is not None:
            _unload(*before, results, borders)
        return results


def _unload(rows: Tensor, arrived: Mark, start: int, results: Sequence[Tensor], borders: Sequence[int]) -> None:
    """Rows from `start` on, from a piece of pinned memory to the images that they belong to."""
    arrived.wait()
    for result, (first, last) in zip(results, itertools.pairwise(borders), strict=True):
        low, high = max(first, start), min(last, start + len(rows))
        if low < high:
            result[low - first : high - first].copy_(rows[low - start : high - start])
