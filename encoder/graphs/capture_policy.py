"""Chooses the next graph to capture, the one that saves the observed traffic most time, and estimates its memory.

Pure Python over batch counts and measured times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from encoder.checkpoint.vision_config import VisionConfig
from encoder.graphs.buffers import GraphKey
from encoder.graphs.traffic_histogram import TrafficHistogram

# A capture costs time and memory: it must save at least this share of the traffic's total run time.
WORTH_WHILE = 0.005
# Pool growth assumed for a graph smaller than a captured one, until one is measured.
_BESIDE_LARGER_BYTES = 16 * 2**20
_MARGIN = 1.1


@dataclass(frozen=True)
class RunTimes:
    """Run times in milliseconds without attention work, measured or interpolated."""

    eager: Callable[[int], float]
    """Time of an eager run, by number of tokens."""
    replay: Callable[[int], float]
    """Time of a replay, by budget, captured or not."""


def best_whole(
    wanted: TrafficHistogram, captured: Collection[GraphKey], candidates: Sequence[GraphKey], prices: RunTimes
) -> GraphKey | None:
    """Returns the candidate without a tighter bound on image length that saves most time; None if none is worth it."""
    sizes = wanted.by_tokens()
    budgets = sorted(key.budget for key in captured)
    # Fastest replay among each captured budget and all larger ones; infinite past the largest.
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


def best_tight(
    wanted: TrafficHistogram, captured: Collection[GraphKey], candidates: Sequence[GraphKey]
) -> GraphKey | None:
    """Returns the candidate for short images that most batches would replay; None if no batch would.

    Candidates need a captured graph of the same budget in `captured`, because packing uses those budgets.
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


class MemoryModel:
    """Estimates how much a capture will grow the memory pool, from the growth of earlier captures."""

    def __init__(self, first_bytes_per_token: int) -> None:
        """`first_bytes_per_token`: computed upper bound; it is the estimate until a graph has been measured."""
        self._first = first_bytes_per_token
        self._beside = _BESIDE_LARGER_BYTES
        self._pool: object = None
        self._largest = self._bytes_here = 0
        self.pool_bytes = 0

    def add(self, budget: int, num_bytes: int, pool: object) -> None:
        """Records that the capture of a graph of `budget` tokens grew `pool` by `num_bytes`."""
        self._enter(pool)
        if budget <= self._largest:
            self._beside = max(self._beside, num_bytes)
        self._largest = max(self._largest, budget)
        self._bytes_here += num_bytes
        self.pool_bytes += num_bytes

    def estimate(self, budget: int, pool: object) -> int:
        """Returns the estimated growth of `pool` in bytes. A graph reuses the memory of a larger one captured there."""
        self._enter(pool)
        if budget <= self._largest:
            return self._beside
        # Allocation granularity inflates the bytes per token of a small graph, hence the minimum.
        per_token = min(self._bytes_here / self._largest, self._first) if self._largest else self._first
        return int(_MARGIN * per_token * budget) + self._beside

    def _enter(self, pool: object) -> None:
        """Forgets the graphs of earlier pools, whose memory no graph of this one reuses."""
        if pool != self._pool:
            self._pool, self._largest, self._bytes_here = pool, 0, 0


def activation_bytes_per_token(config: VisionConfig, itemsize: int, *, fused: bool) -> int:
    """Returns an upper bound in bytes on live activations per token: a block or the mergers, plus levels and output."""
    # Residual stream, norm, q, k, v and attention output. Unfused towers apply rotary to float32 copies of q and k.
    attention = (6 if fused else 15) * config.hidden_size
    # Residual stream and norm; gate, up and their product, or one layer before and after its activation.
    mlp = 2 * config.hidden_size + (3 if config.traits.gated_mlp else 2) * config.intermediate_size
    merged = config.hidden_size * config.merge_unit
    levels = len(config.deepstack_visual_indexes) * merged
    # A merger: residual stream and norm; one layer before and after its activation.
    return itemsize * (max(config.merge_unit * max(attention, mlp), 4 * merged) + levels + config.width)
