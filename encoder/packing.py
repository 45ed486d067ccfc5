"""`pack`: which images run together, and in which token budget.

Pure Python over token counts. It must not know of images, tensors, graphs or queues.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """Images to run together, by index into what was packed, and the budget in tokens to pad to.

    `budget` is None for a single image over the largest budget: it runs eagerly.
    """

    indices: tuple[int, ...]
    budget: int | None


def pack(num_tokens: Sequence[int], *, budgets: Sequence[int], max_images: int) -> list[Batch]:
    """Packs images of `num_tokens[i]` tokens each; every index comes out once, images ascending by tokens, then index.

    A batch takes images as long as they fit the largest budget and number at most `max_images`; its budget is then the
    smallest that holds them. An image over the largest budget is a batch of its own without a budget. `budgets` may
    come in any order. O(n log n). The rule is that of vLLM's first encoder graphs (pull request "Enable ViT
    torch.compile + CUDA Graph"). Raises ValueError for no budget, and for a budget, a `max_images` or a token count
    under 1.
    """
    if not budgets:
        raise ValueError("budgets is empty; there must be at least 1")
    if min(budgets) < 1:
        raise ValueError(f"a budget is {min(budgets)}; it must be at least 1")
    if max_images < 1:
        raise ValueError(f"max_images is {max_images}; it must be at least 1")
    ascending = sorted(range(len(num_tokens)), key=lambda index: (num_tokens[index], index))
    if ascending and num_tokens[ascending[0]] < 1:
        raise ValueError(f"num_tokens[{ascending[0]}] is {num_tokens[ascending[0]]}; it must be at least 1")

    sorted_budgets = sorted(budgets)
    largest = sorted_budgets[-1]
    batches: list[Batch] = []
    taken: list[int] = []
    tokens = 0

    def close() -> None:
        if taken:
            batches.append(Batch(tuple(taken), sorted_budgets[bisect_left(sorted_budgets, tokens)]))
            taken.clear()

    for index in ascending:
        if num_tokens[index] > largest:
            close()
            batches.append(Batch((index,), None))
            continue
        if len(taken) == max_images or tokens + num_tokens[index] > largest:
            close()
        tokens = tokens + num_tokens[index] if taken else num_tokens[index]
        taken.append(index)
    close()
    return batches
