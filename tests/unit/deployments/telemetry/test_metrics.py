"""What an encoder has counted since its start becomes what was added since the last time, by reason."""

from __future__ import annotations

import collections
import logging

import pytest

from deployments.telemetry.log_buffers import SERVE_LOGGER
from deployments.telemetry.metrics import LABELS, Counter, Counters, ErrorLogCounter, RunMetrics
from encoder.packing.run_counts import Fallback, Reason, RunCounts


class Added(Counters):
    """Without Ray."""

    def __init__(self) -> None:
        self.added: collections.Counter[tuple[Counter, str | None]] = collections.Counter()

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        assert list(labels) == ([LABELS[counter]] if counter in LABELS else [])
        if number > 0:
            self.added[counter, next(iter(labels.values()), None)] += number


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_that_is_not_over_0_adds_nothing(number: int) -> None:
    """Ray's counters raise ValueError, which ended the thread that counted."""
    Counters().add(Counter.BATCHES_RETRIED, number)


def test_logged_errors_are_counted_by_their_module_and_once() -> None:
    first, counts = Added(), Added()
    ErrorLogCounter.install(first)
    ErrorLogCounter.install(counts)
    logger = logging.getLogger(SERVE_LOGGER)
    try:
        logger.warning("nothing to count")
        logger.error("of this module")
        logger.exception("of this module as well")
    finally:
        logger.removeHandler(logger.handlers[-1])
    assert (first.added, counts.added) == ({}, {(Counter.ERRORS_LOGGED, "test_metrics"): 2})


def test_who_logs_an_error_does_not_fail_if_it_cannot_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Added):
        def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
            raise RuntimeError("Ray is shutting down")

    handler = ErrorLogCounter(Failing())
    handler.handle(logging.LogRecord(SERVE_LOGGER, logging.ERROR, __file__, 1, "failed", None, None))
    assert "Ray is shutting down" in capsys.readouterr().err


def test_only_what_is_new_is_added() -> None:
    counts = Added()
    tell = RunMetrics(counts)
    tell(RunCounts())
    assert counts.added == {}
    first = RunCounts(
        replays=2, eager_runs={Reason.OVER_LARGEST: 1}, captures=3, refusals=1, tokens=100, replayed_tokens=60,
        padding_tokens=4, grid_hits=5, grid_misses=2, fusion_fallback=Fallback.DIFFERS,
    )  # fmt: skip
    tell(first)
    tell(first)
    tell(RunCounts(replays=3, eager_runs={Reason.OVER_LARGEST: 1, Reason.CHEAPER: 2}, captures=3, refusals=1,
                   tokens=130, replayed_tokens=70, padding_tokens=4, grid_hits=6, grid_misses=2,
                   fusion_fallback=Fallback.DIFFERS))  # fmt: skip
    assert counts.added == {
        (Counter.GRAPH_REPLAYS, None): 3,
        (Counter.EAGER_RUNS, "over_largest_budget"): 1,
        (Counter.EAGER_RUNS, "cheaper_eagerly"): 2,
        (Counter.FUSED_KERNEL_FALLBACKS, "differs_from_eager"): 1,
        (Counter.GRAPH_CAPTURES, None): 3,
        (Counter.GRAPH_CAPTURE_FAILURES, None): 1,
        (Counter.ENCODED_TOKENS, None): 130,
        (Counter.GRAPH_TOKENS, None): 70,
        (Counter.GRAPH_PADDING_TOKENS, None): 4,
        (Counter.GEOMETRY_CACHE_HITS, None): 6,
        (Counter.GEOMETRY_CACHE_MISSES, None): 2,
    }
