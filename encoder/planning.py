"""`plan`: which images run together, in which captured budget or eagerly, so that the whole takes the least time.

The times are measured on the device that will run them (`CostTable`). Pure Python over token counts: it must not know
of images, tensors, graphs or queues.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from encoder.packing import Batch, pack

PAIRS_PER_UNIT = 1_000_000
"""Attention work is counted in millions of pairs of patches that attend to each other."""


@dataclass(frozen=True)
class ImageCost:
    """What an image costs, whatever it is batched with."""

    num_tokens: int
    """After the merge."""
    work: float
    """Pairs of patches in full attention, `t * (h * w)**2`, in units of PAIRS_PER_UNIT."""


@dataclass(frozen=True)
class CostTable:
    """Measured milliseconds. Immutable; a recapture makes a new one."""

    replay_ms: tuple[tuple[int, float], ...]
    """Budget in tokens and the time of its replay without attention work, ascending."""
    eager_ms: tuple[tuple[int, float], ...]
    """Tokens and the time of an eager run of that many without attention work, ascending; linear in between."""
    work_ms: float
    """Time of a unit of attention work."""

    def __post_init__(self) -> None:
        for name, rows in (("replay_ms", self.replay_ms), ("eager_ms", self.eager_ms)):
            sizes = [size for size, _ in rows]
            if sizes != sorted(set(sizes)) or any(size < 1 or ms <= 0 for size, ms in rows):
                raise ValueError(f"{name} must ascend in positive sizes with positive times, got {rows}")
        if not self.eager_ms:
            raise ValueError("eager_ms is empty; there must be at least 1 measurement")
        if self.work_ms < 0:
            raise ValueError(f"work_ms is {self.work_ms}; it must not be negative")

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(budget for budget, _ in self.replay_ms)

    def batch_ms(self, images: Sequence[ImageCost], budget: int | None) -> float:
        """The time of one batch, padded to `budget`, or eagerly at its own size where that is None."""
        tokens = sum(image.num_tokens for image in images)
        base = self.eager(tokens) if budget is None else dict(self.replay_ms)[budget]
        return base + self.work_ms * sum(image.work for image in images)

    def total_ms(self, images: Sequence[ImageCost], batches: Sequence[Batch]) -> float:
        return sum(self.batch_ms([images[index] for index in batch.indices], batch.budget) for batch in batches)

    def eager(self, tokens: int) -> float:
        """Of an eager run without attention work, by interpolation.

        Under the smallest measurement launches dominate, over the largest time is proportional.
        """
        sizes = [size for size, _ in self.eager_ms]
        at = bisect_left(sizes, tokens)
        if at == 0:
            return self.eager_ms[0][1]
        if at == len(sizes):
            size, ms = self.eager_ms[-1]
            return ms * tokens / size
        (low, low_ms), (high, high_ms) = self.eager_ms[at - 1], self.eager_ms[at]
        return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


def plan(images: Sequence[ImageCost], *, table: CostTable, max_images: int, max_tokens: int) -> list[Batch]:
    """Batches of every image once, with `budget=None` for those that run eagerly at their own size.

    The candidates are: filling budgets, the seed's rule (`pack`), and eager runs; the one with the least measured time
    is taken, so no plan is slower by the table than any of them. `max_images` bounds a batch; `max_tokens` bounds an
    eager batch of several images, since its activations take memory.
    """
    if not images:
        return []
    candidates = [_eager(images, max_images, max_tokens)]
    if table.budgets:
        candidates.append(_fill(images, table, max_images))
        counts = [image.num_tokens for image in images]
        candidates.append(pack(counts, budgets=table.budgets, max_images=max_images))
    improved = [[_cheapest(images, batch, table) for batch in batches] for batches in candidates]
    return min(improved, key=lambda batches: table.total_ms(images, batches))


def _cheapest(images: Sequence[ImageCost], batch: Batch, table: CostTable) -> Batch:
    """The same images in the budget that holds them or eagerly, whichever is faster."""
    members = [images[index] for index in batch.indices]
    tokens = sum(image.num_tokens for image in members)
    fitting = [budget for budget in table.budgets if budget >= tokens]
    choices: list[int | None] = [None, *fitting]
    return Batch(batch.indices, min(choices, key=lambda budget: table.batch_ms(members, budget)))


def _eager(images: Sequence[ImageCost], max_images: int, max_tokens: int) -> list[Batch]:
    """As few eager runs as the bounds allow; an image over `max_tokens` runs alone."""
    order = sorted(range(len(images)), key=lambda index: (images[index].num_tokens, index))
    batches: list[Batch] = []
    taken: list[int] = []
    tokens = 0
    for index in order:
        count = images[index].num_tokens
        if taken and (len(taken) == max_images or tokens + count > max_tokens):
            batches.append(Batch(tuple(taken), None))
            taken, tokens = [], 0
        taken.append(index)
        tokens += count
    return [*batches, Batch(tuple(taken), None)]


def _fill(images: Sequence[ImageCost], table: CostTable, max_images: int) -> list[Batch]:
    """Batch by batch: the largest image left, with the others that fill a budget best; the budget by time per token."""
    left = sorted(range(len(images)), key=lambda index: (images[index].num_tokens, index))
    batches: list[Batch] = []
    while left:
        first = images[left[-1]].num_tokens
        others = left[:-1]
        counts = [images[index].num_tokens for index in others]
        all_tokens = first + sum(counts)
        best: tuple[float, int, list[int]] | None = None
        for budget, ms in table.replay_ms:
            if budget < first:
                continue
            chosen = fullest(counts, budget - first, max_images - 1)
            tokens = first + sum(counts[position] for position in chosen)
            if best is None or ms / tokens < best[0]:
                best = (ms / tokens, budget, [others[position] for position in chosen])
            if tokens == all_tokens:
                break  # a larger budget would only add padding
        if best is None:  # over the largest budget
            batches.append(Batch((left[-1],), None))
            left = others
            continue
        members = [*best[2], left[-1]]
        batches.append(Batch(tuple(sorted(members)), best[1]))
        left = [index for index in left if index not in set(members)]
    return batches


def fullest(counts: Sequence[int], capacity: int, most: int) -> list[int]:
    """Positions of at most `most` of the `counts`, whose sum is the largest that does not pass `capacity`.

    Exact. One integer serves as the set of the sums that can be reached with a given number of items, so that an item
    is a shift and an or.
    """
    if most < 1 or capacity < 1:
        return []
    usable = [position for position, count in enumerate(counts) if count <= capacity]
    if len(usable) <= most and sum(counts[position] for position in usable) <= capacity:
        return usable
    mask = (1 << (capacity + 1)) - 1
    most = min(most, len(usable))
    # reached[k]: the sums of exactly k items; steps keeps the state before each item, to walk back.
    reached = [1] + [0] * most
    steps: list[list[int]] = []
    for position in usable:
        steps.append(reached)
        shifted = [0, *((sums << counts[position]) & mask for sums in reached[:-1])]
        reached = [old | new for old, new in zip(reached, shifted, strict=True)]
    total, number = max((sums.bit_length() - 1, -k) for k, sums in enumerate(reached) if sums)
    number = -number
    chosen: list[int] = []
    for position, before in zip(reversed(usable), reversed(steps), strict=True):
        if not (before[number] >> total) & 1:
            chosen.append(position)
            total -= counts[position]
            number -= 1
    return sorted(chosen)
