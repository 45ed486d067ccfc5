"""Packing of videos, which have one attention segment per temporal patch, together with images."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from encoder.packing.cost_based import CostTable, ImageCost, Sums, plan_batches
from encoder.packing.costs import image_cost
from encoder.packing.greedy import Batch, pack

TABLE = CostTable(
    replay_ms=tuple((budget, 0.3 + budget / 1000) for budget in (64, 256, 1024, 4096)),
    eager_ms=((64, 2.0), (2048, 2.1), (16384, 16.4)),
    work_ms=0.01,
)
items = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 12)), max_size=16)


@given(items, st.integers(1, 10))
def test_a_graphs_segments_are_never_exceeded(sizes: list[tuple[int, int]], most: int) -> None:
    costs = [ImageCost(tokens, 0.0, segments) for tokens, segments in sizes]
    plans = plan_batches(costs, table=TABLE, max_images=most, max_tokens=4096)
    greedy = pack(
        [cost.num_tokens for cost in costs],
        budgets=TABLE.budgets,
        max_images=most,
        segments=[cost.num_segments for cost in costs],
    )
    for batches in (plans, greedy):
        assert sorted(index for batch in batches for index in batch.indices) == list(range(len(costs)))
        for batch in batches:
            segments = sum(costs[index].num_segments for index in batch.indices)
            assert segments <= most or (len(batch.indices) == 1 and batch.budget is None)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), max_size=7), st.integers(0, 120), st.integers(0, 8))
def test_the_largest_sum_is_exact(pairs: list[tuple[int, int]], capacity: int, most: int) -> None:
    counts, segments = [count for count, _ in pairs], [number for _, number in pairs]
    sums = Sums(counts, capacity, most, segments)
    chosen = sums.positions(sums.largest(capacity))
    assert sum(segments[position] for position in chosen) <= most
    best = max(
        sum(counts[position] for position in some)
        for number in range(len(counts) + 1)
        for some in combinations(range(len(counts)), number)
        if sum(segments[position] for position in some) <= most
        and sum(counts[position] for position in some) <= capacity
    )
    assert sum(counts[position] for position in chosen) == best


def test_a_video_fills_the_segments_that_its_frames_are() -> None:
    costs = [image_cost((6, 8, 8), 4), image_cost((1, 8, 8), 4), image_cost((2, 8, 8), 4)]
    assert [cost.num_segments for cost in costs] == [6, 1, 2]
    batches = pack(
        [cost.num_tokens for cost in costs], budgets=[256], max_images=7, segments=[cost.num_segments for cost in costs]
    )
    assert batches == [Batch((1, 2), 256), Batch((0,), 256)]
