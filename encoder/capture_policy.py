"""Which graph to capture next: the one that saves the traffic most time, within a bound of memory known beforehand.

Pure Python over counts and prices. It must not know graphs, devices or clocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from encoder.fit_budgets import fit_budgets
from encoder.graph_inputs import GraphKey
from encoder.vision_config import VisionConfig
from encoder.wanted import Wanted

# A capture takes time and memory: it has to save at least this share of what the traffic takes.
WORTH_WHILE = 0.005
LEARN_FROM_BATCHES = 200
_LEARNT_SIZES = 64
# A graph beside a larger one takes little of the pool; before any was measured, this much.
_BESIDE_LARGER_BYTES = 16 * 2**20
_MARGIN = 1.1


@dataclass(frozen=True)
class Prices:
    """Milliseconds without attention work, as far as they are known."""

    eager: Callable[[int], float]
    """Of a run of so many tokens without a graph."""
    replay: Callable[[int], float]
    """Of a replay of this budget, captured or not."""


def best_whole(
    wanted: Wanted, captured: Collection[GraphKey], candidates: Sequence[GraphKey], prices: Prices
) -> GraphKey | None:
    """The candidate that any image may fill which saves most; None where none is worth a capture."""
    sizes = wanted.by_tokens()
    budgets = sorted(key.budget for key in captured)
    # Of each captured budget or any larger one; nothing larger is left at the end.
    cheapest = [float("inf")]
    for budget in reversed(budgets):
        cheapest.append(min(cheapest[-1], prices.replay(budget)))
    cheapest.reverse()
    now = {tokens: min(prices.eager(tokens), cheapest[bisect_left(budgets, tokens)]) for tokens in sizes}
    total = sum(number * now[tokens] for tokens, number in sizes.items())
    best, most = None, WORTH_WHILE * total
    for key in candidates:
        price = prices.replay(key.budget)
        saved = sum(n * max(0.0, now[t] - price) for t, n in sizes.items() if t <= key.budget)
        if saved > most:
            best, most = key, saved
    return best


def best_tight(wanted: Wanted, captured: Collection[GraphKey], candidates: Sequence[GraphKey]) -> GraphKey | None:
    """Of the candidates for short images, the one that most batches would run in; None where none would.

    Only beside a captured graph of the same budget: batches are packed by those.
    """
    budgets = sorted({key.budget for key in captured})
    best, most = None, 0
    for key in candidates:
        if key.budget not in budgets:
            continue
        below = max((budget for budget in budgets if budget < key.budget), default=0)
        number = wanted.number(below, key.budget, key.max_seqlen)
        if number > most:
            best, most = key, number
    return best


def learnt_budgets(wanted: Wanted, count: int, largest: int) -> tuple[int, ...]:
    """The budgets that the traffic so far asks for; none before there was enough of it."""
    if wanted.total < LEARN_FROM_BATCHES:
        return ()
    sizes = {tokens: number for tokens, number in wanted.by_tokens().items() if tokens <= largest}
    return tuple(budget for budget in fit_budgets(sizes, count, most_sizes=_LEARNT_SIZES) if budget <= largest)


class MemoryModel:
    """How much the pool will grow for a graph, from how much it grew for others."""

    def __init__(self, first_bytes_per_token: int) -> None:
        """`first_bytes_per_token`: an upper bound, by arithmetic, which holds until a graph was measured."""
        self._first = first_bytes_per_token
        self._largest = 0
        self._beside = _BESIDE_LARGER_BYTES
        self.pool_bytes = 0

    def add(self, budget: int, num_bytes: int) -> None:
        """A graph of `budget` was captured and the pool grew by `num_bytes`."""
        if budget <= self._largest:
            self._beside = max(self._beside, num_bytes)
        self._largest = max(self._largest, budget)
        self.pool_bytes += num_bytes

    def estimate(self, budget: int) -> int:
        """Bytes that the pool will grow by. Smaller graphs fit into a larger one's memory, larger ones into none's."""
        if budget <= self._largest:
            return self._beside
        # Of a small graph, what allocators round up to would be told of every token of a large one.
        per_token = min(self.pool_bytes / self._largest, self._first) if self._largest else self._first
        return int(_MARGIN * per_token * budget) + self._beside


def activation_bytes_per_token(config: VisionConfig, itemsize: int, *, fused: bool) -> int:
    """An upper bound on what a forward holds at once: in a block, or in the mergers, beside levels and the output."""
    # Stream, norm, q, k, v and what is attended; plain towers turn q and k in float32, which takes copies of them.
    attention = (6 if fused else 15) * config.hidden_size
    # Stream and norm; gate, what it gates and both together, or one layer before and after its activation.
    mlp = 2 * config.hidden_size + (3 if config.architecture == "qwen2_5_vl" else 2) * config.intermediate_size
    merged = config.hidden_size * config.merge_unit
    merger = config.merge_unit * config.hidden_size + 3 * merged
    levels = len(config.deepstack_visual_indexes) * merged
    return itemsize * (max(config.merge_unit * max(attention, mlp), merger) + levels + config.width)
