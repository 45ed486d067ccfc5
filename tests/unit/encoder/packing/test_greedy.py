"""The packer's contract, as properties over random work and as worked examples."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from encoder.packing.greedy import Batch, pack

counts = st.lists(st.integers(1, 300), max_size=60)
budget_lists = st.lists(st.integers(1, 250), min_size=1, max_size=6)
image_limits = st.integers(1, 9)


@given(counts, budget_lists, image_limits)
def test_every_index_comes_out_once(num_tokens: list[int], budgets: list[int], max_images: int) -> None:
    batches = pack(num_tokens, budgets=budgets, max_images=max_images)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(num_tokens)))


@given(counts, budget_lists, image_limits)
def test_order_can_be_restored(num_tokens: list[int], budgets: list[int], max_images: int) -> None:
    restored: dict[int, int] = {}
    for batch in pack(num_tokens, budgets=budgets, max_images=max_images):
        outputs = [num_tokens[index] for index in batch.indices]  # stands for what the tower returns, in batch order
        restored.update(zip(batch.indices, outputs, strict=True))
    assert [restored[index] for index in range(len(num_tokens))] == num_tokens


@given(counts, budget_lists, image_limits)
def test_budget_is_the_smallest_that_holds_the_batch(
    num_tokens: list[int], budgets: list[int], max_images: int
) -> None:
    for batch in pack(num_tokens, budgets=budgets, max_images=max_images):
        assert 1 <= len(batch.indices) <= max_images
        total = sum(num_tokens[index] for index in batch.indices)
        assert batch.budget == min((budget for budget in budgets if budget >= total), default=None)


@given(counts, budget_lists, image_limits)
def test_only_what_no_budget_holds_is_without_one_and_it_is_alone(
    num_tokens: list[int], budgets: list[int], max_images: int
) -> None:
    batches = pack(num_tokens, budgets=budgets, max_images=max_images)
    eager = [batch.indices for batch in batches if batch.budget is None]
    oversized = [index for index, tokens in enumerate(num_tokens) if tokens > max(budgets)]
    assert sorted(eager) == [(index,) for index in oversized]


@given(counts, budget_lists, image_limits)
def test_ascending_and_greedy(num_tokens: list[int], budgets: list[int], max_images: int) -> None:
    batches = pack(num_tokens, budgets=budgets, max_images=max_images)
    order = [index for batch in batches for index in batch.indices]
    assert order == sorted(order, key=lambda index: (num_tokens[index], index))
    for batch, following in pairwise(batches):
        if batch.budget is not None:  # it could not have taken the next image too
            more = sum(num_tokens[index] for index in (*batch.indices, following.indices[0]))
            assert len(batch.indices) == max_images or more > max(budgets)


@given(counts, budget_lists, image_limits, st.randoms(use_true_random=False))
def test_deterministic_whatever_the_order_of_the_budgets(
    num_tokens: list[int], budgets: list[int], max_images: int, random: Random
) -> None:
    shuffled = list(budgets)
    random.shuffle(shuffled)
    expected = pack(num_tokens, budgets=budgets, max_images=max_images)
    assert pack(num_tokens, budgets=shuffled, max_images=max_images) == expected
    assert pack(tuple(num_tokens), budgets=(*budgets, *budgets), max_images=max_images) == expected


def test_worked_example() -> None:
    assert pack([500, 64, 9000, 64, 1500], budgets=[2048, 512, 128], max_images=16) == [
        Batch((1, 3, 0), 2048),
        Batch((4,), 2048),
        Batch((2,), None),
    ]


def test_exact_fits_and_ties() -> None:
    assert pack([50, 50, 50], budgets=[50, 100], max_images=3) == [Batch((0, 1), 100), Batch((2,), 50)]


def test_image_limit_closes_a_batch() -> None:
    assert pack([1] * 5, budgets=[4, 64], max_images=2) == [Batch((0, 1), 4), Batch((2, 3), 4), Batch((4,), 4)]


def test_nothing_to_pack() -> None:
    assert pack([], budgets=[1], max_images=1) == []
