"""Batches through two sets of buffers, on lanes that put their work off as long as they may.

The deferred lanes keep what they are given and do it when somebody must wait, choosing at random among the lanes that
may go on. So a buffer that is written again or read too early gives wrong numbers here, as it would on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.decoded import Decoded
from encoder.images.size import Grid
from encoder.packing.greedy import Batch
from encoder.pixels.preprocess import Pixels, patchify, resize
from encoder.staging.pipeline import Launched, Pipeline
from encoder.staging.staging import Staging, StagingBounds
from encoder.staging.streams import Lane, Lanes, Mark, lanes_for

T = TypeVar("T")
CPU = torch.device("cpu")
RULES = ImageRules(patch_size=4)
PATCH_DIM = 3 * 2 * 16
BOUNDS = StagingBounds(pinned_bytes=4 * 40_000, max_kept_bytes=60_000)


class Device:
    """Lanes whose work is put off, and the host memory that was pinned."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lanes: list[Deferred] = []
        self.pinned_bytes = 0
        self.direct = False

    def pin(self, num_bytes: int) -> torch.Tensor:
        self.pinned_bytes += num_bytes
        return torch.full((num_bytes,), 99, dtype=torch.uint8)

    def as_lanes(self) -> Lanes:
        copy_in, compute, copy_out = self.lanes = [Deferred(self) for _ in range(3)]
        return Lanes(copy_in, compute, copy_out, CPU, self.pin, lambda _: self.direct)

    def step(self) -> None:
        """The next piece of work of one of the lanes that may go on."""
        able = [lane for lane in self.lanes if lane.able()]
        assert able, "the lanes wait for each other"
        self.random.choice(able).go_on()

    def settle(self) -> None:
        while any(lane.work for lane in self.lanes):
            self.step()


@dataclass
class DeferredMark(Mark):
    device: Device
    reached: bool = False

    def wait(self) -> None:
        while not self.reached:
            self.device.step()

    def is_done(self) -> bool:
        return self.reached


class Deferred(Lane):
    """A lane. Work that makes a tensor is done at once, as an allocation is."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: list[Callable[[], object] | DeferredMark | Wait] = []

    def enqueue(self, work: Callable[[], T]) -> T:
        if getattr(work, "__name__", "") == "<lambda>" and "empty" in work.__code__.co_names:
            made: Any = work()
            made.view(torch.uint8).fill_(111)
            return made
        self.work.append(work)
        return None  # type: ignore[return-value]

    def mark(self) -> DeferredMark:
        mark = DeferredMark(self.device)
        self.work.append(mark)
        return mark

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, DeferredMark)
        self.work.append(Wait(mark))

    def able(self) -> bool:
        return bool(self.work) and not (isinstance(self.work[0], Wait) and not self.work[0].mark.reached)

    def go_on(self) -> None:
        item = self.work.pop(0)
        if isinstance(item, DeferredMark):
            item.reached = True
        elif not isinstance(item, Wait):
            with torch.inference_mode():
                item()


@dataclass
class Wait:
    mark: DeferredMark


def image(seed: int) -> Pixels | Decoded:
    """Resized on the device or before, of any of several sizes."""
    rng = np.random.default_rng(seed)
    grid = (1, 2 * int(rng.integers(1, 5)), 2 * int(rng.integers(1, 5)))
    if seed % 2:
        return Pixels(rng.integers(0, 256, (3, 4 * grid[1], 4 * grid[2]), dtype=np.uint8), grid)
    height, width = (int(side) for side in rng.integers(1, 50, 2))
    return Decoded(rng.integers(0, 256, (height, width, 3), dtype=np.uint8), grid)


def expected(each: Pixels | Decoded) -> torch.Tensor:
    """What the tower below makes of an image: twice the first value of each token's patches, in a few columns."""
    pixels = resize(each, RULES) if isinstance(each, Decoded) else each
    return 2 * patchify(torch.from_numpy(pixels.values), RULES).view(-1, 4, PATCH_DIM)[:, :, :7].flatten(1)


@dataclass
class Tower:
    """Deferred like everything else; fails for the batches in `bad`."""

    lanes: Lanes
    bad: set[int] = field(default_factory=set)
    calls: int = 0

    def plan(self, grids: Sequence[Grid]) -> list[Batch]:
        return [Batch(tuple(range(start, min(start + 3, len(grids)))), None) for start in range(0, len(grids), 3)]

    def run(self, patches: torch.Tensor, grids: Sequence[Grid], budget: int | None) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.bad:
            raise RuntimeError("out of memory")
        output = torch.full((len(patches) // 4, 28), float("nan"))
        self.lanes.compute.enqueue(lambda: output.copy_(2 * patches.view(-1, 4, PATCH_DIM)[:, :, :7].flatten(1)))
        return output


def pipeline_on(device: Device, bad: Iterable[int] = ()) -> tuple[Pipeline, Tower, Staging]:
    lanes = device.as_lanes()
    tower, staging = Tower(lanes, set(bad)), Staging(RULES, lanes, BOUNDS)
    return Pipeline(staging, tower.plan, tower.run, dtype=torch.float32), tower, staging


def fetched(launched: Iterator[Launched], late: int) -> Iterator[tuple[tuple[int, ...], list[torch.Tensor]]]:
    """Each batch's results, fetched when `late` more have been launched."""
    waiting: list[Launched] = []
    for each in launched:
        waiting.append(each)
        if len(waiting) > late:
            first = waiting.pop(0)
            yield first.batch.indices, first.fetch()
    for each in waiting:
        yield each.batch.indices, each.fetch()


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_image_gets_its_own_tokens(seed: int, late: int, direct: bool) -> None:
    device = Device(seed)
    device.direct = direct
    pipeline, _, staging = pipeline_on(device)
    images = [image(100 * seed + number) for number in range(25)]
    found: dict[int, torch.Tensor] = {}
    for indices, tokens in fetched(pipeline.launch(images), late):
        found.update(zip(indices, tokens, strict=True))
    assert sorted(found) == list(range(25))
    for number, each in enumerate(images):
        assert torch.equal(found[number], expected(each))
    assert device.pinned_bytes == BOUNDS.pinned_bytes, "all of it when the staging is made, and nothing later"
    counts = staging.counts
    assert counts.batches == 9
    assert (counts.bytes_direct > 0) == direct
    assert (counts.bytes_pinned > 0) == (not direct)
    assert counts.bytes_unpinned == 0


def test_many_images_are_packed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to pack them grew with the square of their number: 17 s for 4,000."""
    monkeypatch.setattr("encoder.staging.pipeline.PLANNED_TOGETHER", 7)
    pipeline, _, _ = pipeline_on(Device(0))
    images = [image(number) for number in range(25)]
    found = {
        index: one
        for batch, all_ in fetched(pipeline.launch(images), 1)
        for index, one in zip(batch, all_, strict=True)
    }
    assert list(found) == list(range(25))
    assert all(torch.equal(found[number], expected(each)) for number, each in enumerate(images))


def test_at_most_two_batches_are_under_way() -> None:
    device = Device(0)
    pipeline, _, _ = pipeline_on(device)
    under_way: list[Launched] = []
    for each in pipeline.launch([image(number) for number in range(18)]):
        under_way.append(each)
        open_batches = [launched for launched in under_way if not launched.ready.is_done()]
        assert len(open_batches) <= 2
    assert len(open_batches) == 2, "and two, where nobody waits in between"
    pipeline.wait_for_room()
    assert [launched.ready.is_done() for launched in under_way[-2:]] == [True, False]


def test_a_set_is_not_written_while_its_batch_is_computed() -> None:
    """The buffers of a batch that is not computed yet are none of those that the next one is given."""
    device = Device(3)
    pipeline, _, _ = pipeline_on(device)
    under_way: list[Launched] = []
    for each in pipeline.launch([image(number) for number in range(40)]):
        for other in under_way:
            if not other.ready.is_done():
                assert other.staged.buffer.data_ptr() != each.staged.buffer.data_ptr()
        under_way.append(each)


@pytest.mark.parametrize("seed", range(5))
def test_a_failed_batch_leaves_the_buffers_usable(seed: int) -> None:
    device = Device(seed)
    pipeline, tower, _ = pipeline_on(device, bad={2, 3})
    images = [image(number) for number in range(6)]
    launches = pipeline.launch(images)
    first = next(launches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            next(pipeline.launch(images[3:]))
    assert tower.calls == 3
    assert all(torch.equal(a, expected(b)) for a, b in zip(first.fetch(), images[:3], strict=True))
    for indices, tokens in fetched(pipeline.launch(images), 1):
        assert all(torch.equal(a, expected(images[i])) for i, a in zip(indices, tokens, strict=True))


def test_a_batch_that_cannot_be_staged_leaves_the_buffers_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(1)
    pipeline, _, staging = pipeline_on(device)
    copy_in = Staging._copy_in

    def broken(*arguments: Any) -> None:
        copy_in(*arguments)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "_copy_in", broken)
        for _ in range(3):
            with pytest.raises(MemoryError):
                next(pipeline.launch([image(4)]))
    with pytest.raises(ValueError, match="images is empty"):
        staging.stage([])
    with pytest.raises(ValueError, match="merge size"):
        staging.stage([Pixels(np.zeros((3, 12, 8), np.uint8), (1, 3, 2))])
    images = [image(number) for number in range(9)]
    for indices, tokens in fetched(pipeline.launch(images), 2):
        assert all(torch.equal(a, expected(images[i])) for i, a in zip(indices, tokens, strict=True))


def test_a_failed_fetch_leaves_the_pinned_memory_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(2)
    pipeline, _, staging = pipeline_on(device)
    small = StagingBounds(pinned_bytes=4 * 28 * 4 * 3)  # three tokens a piece
    staging._outgoing = Staging(RULES, staging.lanes, small)._outgoing
    images = [image(number) for number in range(6)]
    first, second = pipeline.launch(images)

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("encoder.staging.staging._copy_to_images", full)
        with pytest.raises(MemoryError):
            first.fetch()
    for tokens in (second.fetch(), first.fetch()):
        chosen = images[3:] if tokens[0].shape == expected(images[3]).shape else images[:3]
        assert all(torch.equal(a, expected(b)) for a, b in zip(tokens, chosen, strict=True))


def test_what_does_not_fit_the_pinned_memory_is_copied_without_it_and_counted() -> None:
    device = Device(5)
    lanes = device.as_lanes()
    bounds = StagingBounds(pinned_bytes=4 * 6_000, max_kept_bytes=1_000)
    tower, staging = Tower(lanes), Staging(RULES, lanes, bounds)
    pipeline = Pipeline(staging, tower.plan, tower.run, dtype=torch.float32)
    rng = np.random.default_rng(0)
    images = [Decoded(rng.integers(0, 256, (60, side, 3), dtype=np.uint8), (1, 4, 2)) for side in (20, 50, 10, 70, 5)]
    for indices, tokens in fetched(pipeline.launch(images), 1):
        assert all(torch.equal(a, expected(images[i])) for i, a in zip(indices, tokens, strict=True))
    assert staging.counts.bytes_unpinned >= 60 * 3 * (50 + 70)
    assert staging.counts.oversized == 2
    assert device.pinned_bytes == bounds.pinned_bytes


def test_embeddings_larger_than_a_piece_of_pinned_memory_come_in_pieces() -> None:
    device = Device(6)
    lanes = device.as_lanes()
    tower = Tower(lanes)
    staging = Staging(RULES, lanes, StagingBounds(pinned_bytes=4 * 28 * 4 * 2))  # two tokens
    pipeline = Pipeline(staging, tower.plan, tower.run, dtype=torch.float32)
    images = [image(number) for number in range(9)]
    for indices, tokens in fetched(pipeline.launch(images), 2):
        assert all(torch.equal(a, expected(images[i])) for i, a in zip(indices, tokens, strict=True))
    tiny = Staging(RULES, lanes, StagingBounds(pinned_bytes=4 * 100))
    with pytest.raises(ValueError, match="a token has 112 bytes; a pinned buffer holds 100"):
        tiny.fetch(torch.zeros(2, 28), [2], lanes.compute.mark())


def test_on_the_cpu_it_is_plain_calls() -> None:
    lanes = lanes_for(CPU)
    staging = Staging(RULES, lanes, BOUNDS)

    def run(patches: torch.Tensor, grids: Sequence[Grid], budget: int | None) -> torch.Tensor:
        return 2 * patches.view(-1, 4, PATCH_DIM)[:, :, :7].flatten(1)

    pipeline = Pipeline(staging, Tower(lanes).plan, run, dtype=torch.float32)
    images = [image(number) for number in range(7)]
    for launched in pipeline.launch(images):
        assert launched.ready.is_done()
        on_device = launched.on_device()
        for index, host, device in zip(launched.batch.indices, launched.fetch(), on_device, strict=True):
            assert torch.equal(host, expected(images[index]))
            assert torch.equal(device, host)
            assert host.data_ptr() != launched.outputs.data_ptr()
