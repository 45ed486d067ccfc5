"""What an encoder has counted since its start becomes what was added since the last time, by reason."""

from __future__ import annotations

from collections import Counter

from deployments.metrics import Count, Counts, RunMetrics, Tier
from encoder.run_counts import Reason, RunCounts


class Added(Counts):
    """Without Ray."""

    def __init__(self) -> None:
        self.added: Counter[tuple[Count, str | None]] = Counter()

    def add(self, count: Count, number: int = 1, *, reason: str | None = None, tier: Tier | None = None) -> None:
        assert number > 0
        assert tier is None
        assert (reason is not None) == (count is Count.EAGER_RUNS)
        self.added[count, reason] += number


def test_only_what_is_new_is_added() -> None:
    counts = Added()
    tell = RunMetrics(counts)
    tell(RunCounts())
    assert counts.added == {}
    first = RunCounts(
        replays=2, eager_runs={Reason.OVER_LARGEST: 1}, captures=3, refusals=1, tokens=100, replayed_tokens=60,
        padding_tokens=4, grid_hits=5, grid_misses=2,
    )  # fmt: skip
    tell(first)
    tell(first)
    tell(RunCounts(replays=3, eager_runs={Reason.OVER_LARGEST: 1, Reason.CHEAPER: 2}, captures=3, refusals=1,
                   tokens=130, replayed_tokens=70, padding_tokens=4, grid_hits=6, grid_misses=2))  # fmt: skip
    assert counts.added == {
        (Count.GRAPH_REPLAYS, None): 3,
        (Count.EAGER_RUNS, "over_largest_budget"): 1,
        (Count.EAGER_RUNS, "cheaper_eagerly"): 2,
        (Count.GRAPH_CAPTURES, None): 3,
        (Count.GRAPH_REFUSALS, None): 1,
        (Count.ENCODED_TOKENS, None): 130,
        (Count.REPLAYED_TOKENS, None): 70,
        (Count.PADDING_TOKENS, None): 4,
        (Count.GRID_HITS, None): 6,
        (Count.GRID_MISSES, None): 2,
    }
