"""`pack`: packs images greedily into batches with a token budget each. Pure Python over token counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Images that run together."""

    indices: tuple[int, ...]
    """Indices into the packed sequence."""
    budget: int | None
    """Tokens to pad to; None is an eager run without padding."""


def pack(
    num_tokens: Sequence[int], *, budgets: Sequence[int], max_images: int, segments: Sequence[int] | None = None
) -> list[Batch]:
    """Packs images of `num_tokens[i]` tokens; every index occurs once, ascending by tokens, then index.

    A batch takes images until the largest budget or `max_images` segments are reached; its budget is the smallest that
    holds them. An image over either is a batch of its own with `budget=None`. `budgets`: at least one, in any order.
    `segments`: of each image, one per temporal patch of a video; None for one each. O(n log n). The rule is that of
    vLLM's first encoder graphs (pull request "Enable ViT torch.compile + CUDA Graph").
    """
    ascending = sorted(range(len(num_tokens)), key=lambda index: (num_tokens[index], index))
    sorted_budgets = sorted(budgets)
    largest = sorted_budgets[-1]
    batches: list[Batch] = []
    segments = segments or [1] * len(num_tokens)
    taken: list[int] = []
    tokens = used = 0

    def close() -> None:
        if taken:
            batches.append(Batch(tuple(taken), sorted_budgets[bisect_left(sorted_budgets, tokens)]))
            taken.clear()

    for index in ascending:
        if num_tokens[index] > largest or segments[index] > max_images:
            close()
            batches.append(Batch((index,), None))
            continue
        if used + segments[index] > max_images or tokens + num_tokens[index] > largest:
            close()
        tokens = tokens + num_tokens[index] if taken else num_tokens[index]
        used = used + segments[index] if taken else segments[index]
        taken.append(index)
    close()
    return batches
