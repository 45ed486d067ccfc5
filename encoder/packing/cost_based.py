"""`plan_batches`: packs images into batches, each in a captured budget or eager, for the least total run time.

Times are measured on the device that runs the batches (`CostTable`). Pure Python over token counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import itemgetter

from encoder.packing.greedy import Batch, pack

WORTHWHILE = 1.08
"""A budget is worth a launch of its own if its time per token is at most this multiple of the best budget's."""
PAIRS_PER_UNIT = 1_000_000
"""Attention work is counted in millions of pairs of patches that attend to each other."""


@dataclass(frozen=True)
class ImageCost:
    """Cost of an image, independent of its batch."""

    num_tokens: int
    """After the merge."""
    work: float
    """Pairs of patches in full attention, `t * (h * w)**2`, in units of PAIRS_PER_UNIT."""
    num_segments: int = 1
    """Segments of full attention: 1 for an image, one per temporal patch for a video."""


@dataclass(frozen=True)
class CostTable:
    """Measured times in milliseconds. Immutable; new measurements make a new table.

    table = CostTable(replay_ms=((64, 1.0), (256, 2.5)), eager_ms=((64, 2.0), (1024, 9.0)), work_ms=0.01)
    batches = plan_batches(images, table=table, max_images=16, max_tokens=1024)
    """

    replay_ms: tuple[tuple[int, float], ...]
    """Pairs of budget in tokens and time of its replay without attention work, ascending."""
    eager_ms: tuple[tuple[int, float], ...]
    """Pairs of tokens and time of an eager run without attention work, ascending; interpolated linearly."""
    work_ms: float
    """Time of one unit of attention work."""

    def __post_init__(self) -> None:
        for name, rows in (("replay_ms", self.replay_ms), ("eager_ms", self.eager_ms)):
            sizes = [size for size, _ in rows]
            if sizes != sorted(set(sizes)) or any(not size >= 1 or not 0 < ms < math.inf for size, ms in rows):
                raise ValueError(f"{name} must ascend in positive sizes with finite positive times, got {rows}")
        if not self.eager_ms:
            raise ValueError("eager_ms is empty; there must be at least 1 measurement")
        if not 0 <= self.work_ms < math.inf:
            raise ValueError(f"work_ms is {self.work_ms}; it must be finite and not negative")

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        return tuple(budget for budget, _ in self.replay_ms)

    def batch_ms(self, images: Sequence[ImageCost], budget: int | None) -> float:
        """Returns the time of one batch, padded to `budget`; None is an eager run without padding."""
        tokens = sum(image.num_tokens for image in images)
        return self.base_ms(tokens, budget) + self.work_ms * sum(image.work for image in images)

    def total_ms(self, images: Sequence[ImageCost], batches: Sequence[Batch]) -> float:
        return sum(self.batch_ms([images[index] for index in batch.indices], batch.budget) for batch in batches)

    def base_ms(self, tokens: int, budget: int | None) -> float:
        """Returns the time of a batch without attention work, whose total does not depend on the packing."""
        return self.eager_base_ms(tokens) if budget is None else self._replays[budget]

    def cheapest_budget(self, tokens: int) -> int | None:
        """Returns the fastest budget that holds `tokens`; None if none does or an eager run takes no longer."""
        ms, budget = min(((ms, budget) for budget, ms in self.replay_ms if budget >= tokens), default=(math.inf, None))
        return None if self.eager_base_ms(tokens) <= ms else budget

    @cached_property
    def worthwhile_tokens(self) -> int | None:
        """The smallest budget worth a launch (`WORTHWHILE`): larger batches gain little. None without graphs."""
        if not self.replay_ms:
            return None
        most = WORTHWHILE * min(ms / budget for budget, ms in self.replay_ms)
        return next(budget for budget, ms in self.replay_ms if ms / budget <= most)

    def split_for_latency(self, num_tokens: Sequence[int], max_images: int) -> list[range]:
        """Splits images, in order, into parts to be launched one after another, so that the first embeddings are ready
        before the last images start. Each part is the shortest one whose time per token is at most WORTHWHILE times
        that of the best part of at most `max_images` that begins there."""
        parts: list[range] = []
        start = 0
        while start < len(num_tokens):
            totals = list(accumulate(num_tokens[start : start + max_images]))
            ms = [self.base_ms(total, self.cheapest_budget(total)) / total for total in totals]
            stop = start + 1 + next(at for at, each in enumerate(ms) if each <= WORTHWHILE * min(ms))
            parts.append(range(start, stop))
            start = stop
        return parts

    @cached_property
    def _replays(self) -> dict[int, float]:
        return dict(self.replay_ms)

    def eager_base_ms(self, tokens: int) -> float:
        """Returns the time of an eager run without attention work, by interpolation."""
        return interpolate_ms(self.eager_ms, tokens)


def interpolate_ms(measured: Sequence[tuple[int, float]], tokens: int) -> float:
    """Interpolates linearly between pairs of tokens and milliseconds, at least one, ascending.

    Below the smallest measurement the time is constant, since launches dominate; above the largest it is proportional.
    """
    at = bisect_left(measured, tokens, key=itemgetter(0))
    if at == 0:
        return measured[0][1]
    if at == len(measured):
        size, ms = measured[-1]
        return ms * tokens / size
    (low, low_ms), (high, high_ms) = measured[at - 1], measured[at]
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


def plan_batches(images: Sequence[ImageCost], *, table: CostTable, max_images: int, max_tokens: int) -> list[Batch]:
    """Packs every image into exactly one batch; `budget=None` is an eager run without padding.

    The plan is the fastest by the table of three candidates: filling budgets, the greedy rule (`pack`), and eager runs.
    `max_images` bounds the segments of every batch of several images; `max_tokens` bounds an eager batch of several
    images, since its activations take memory. Recent plans are cached.
    """
    # Attention work is the same in every plan, so tokens and segments are sufficient.
    segments = tuple(image.num_segments for image in images)
    return list(_plan(tuple(image.num_tokens for image in images), segments, table, max_images, max_tokens))


@lru_cache(maxsize=4096)
def _plan(
    counts: tuple[int, ...], segments: tuple[int, ...], table: CostTable, max_images: int, max_tokens: int
) -> tuple[Batch, ...]:
    if not counts:
        return ()
    # `cheapest` chooses each batch's budget, so that the first candidate is eager runs within the bounds.
    candidates = [pack(counts, budgets=(max_tokens,), max_images=max_images, segments=segments)]
    if table.budgets:
        candidates.append(_fill(counts, segments, table, max_images))
        candidates.append(pack(counts, budgets=table.budgets, max_images=max_images, segments=segments))

    def tokens(batch: Batch) -> int:
        return sum(counts[index] for index in batch.indices)

    def cheapest(batch: Batch) -> Batch:
        fits = sum(segments[index] for index in batch.indices) <= max_images
        return Batch(batch.indices, table.cheapest_budget(tokens(batch)) if fits else None)

    improved = [tuple(cheapest(batch) for batch in batches) for batches in candidates]
    return min(improved, key=lambda batches: sum(table.base_ms(tokens(batch), batch.budget) for batch in batches))


def _fill(counts: Sequence[int], segments: Sequence[int], table: CostTable, max_images: int) -> list[Batch]:
    """Builds batches of the largest remaining image and those that best fill a budget, chosen by time per token."""
    left = sorted(range(len(counts)), key=lambda index: (counts[index], index))
    batches: list[Batch] = []
    while left:
        first = counts[left[-1]]
        others = left[:-1]
        rest = [counts[index] for index in others]
        if first > table.budgets[-1] or segments[left[-1]] > max_images:
            batches.append(Batch((left[-1],), None))
            left = others
            continue
        all_tokens = first + sum(rest)
        room = max_images - segments[left[-1]]
        sums = Sums(rest, min(table.budgets[-1], all_tokens) - first, room, [segments[index] for index in others])
        best: tuple[float, int, int] | None = None
        for budget, ms in table.replay_ms:
            if budget < first:
                continue
            tokens = first + sums.largest(budget - first)
            if best is None or ms / tokens < best[0]:
                best = (ms / tokens, budget, tokens - first)
            if tokens == all_tokens:
                break  # a larger budget would only add padding
        assert best is not None
        members = [*(others[position] for position in sums.positions(best[2])), left[-1]]
        batches.append(Batch(tuple(sorted(members)), best[1]))
        left = [index for index in left if index not in set(members)]
    return batches


class Sums:
    """Exact subset sums of counts whose segments are at most `most` together, up to a capacity.

    The bits of one integer are the set of sums reachable with a given number of segments; adding an item is a shift and
    an or. `segments`: of each count; None for one each.
    """

    def __init__(self, counts: Sequence[int], capacity: int, most: int, segments: Sequence[int] | None = None) -> None:
        self._counts = counts
        self._segments = segments or [1] * len(counts)
        self._usable = [position for position, count in enumerate(counts) if count <= capacity]
        most = min(max(most, 0), sum(self._segments[position] for position in self._usable))
        mask = (1 << (max(capacity, 0) + 1)) - 1
        # reached[k]: sums of exactly k segments; `_steps` keeps the state before each item, for backtracking.
        reached = [1] + [0] * most
        self._steps: list[list[int]] = []
        for position in self._usable:
            self._steps.append(reached)
            shifted = [0] * self._segments[position] + [(sums << counts[position]) & mask for sums in reached]
            reached = [old | new for old, new in zip(reached, shifted, strict=False)]
        self._reached = reached
        self._any = 0
        for sums in reached:
            self._any |= sums

    def largest(self, capacity: int) -> int:
        """Returns the largest reachable sum that is at most `capacity`."""
        return (self._any & ((1 << (max(capacity, 0) + 1)) - 1)).bit_length() - 1

    def positions(self, total: int) -> list[int]:
        """Returns positions with the sum `total`, which must be reachable, and the fewest segments."""
        number = next(number for number, sums in enumerate(self._reached) if (sums >> total) & 1)
        chosen: list[int] = []
        for position, before in zip(reversed(self._usable), reversed(self._steps), strict=True):
            if not (before[number] >> total) & 1:
                chosen.append(position)
                total -= self._counts[position]
                number -= self._segments[position]
        return sorted(chosen)
