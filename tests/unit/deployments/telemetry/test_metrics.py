"""What an encoder has counted since its start becomes what was added since the last time, by reason."""

from __future__ import annotations

import logging

import pytest
from ray import serve

from deployments.telemetry.log_buffers import SERVE_LOGGER
from deployments.telemetry.metrics import Counter, Counters, ErrorLogCounter, RunMetrics
from deployments.transfer import unix_socket
from encoder.packing.run_counts import Fallback, Reason, RunCounts
from tests.unit.deployments.telemetry.added import Added


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_that_is_not_over_0_adds_nothing(number: int) -> None:
    """Ray's counters raise ValueError, which ended the thread that counted."""
    Counters().add(Counter.BATCHES_RETRIED, number)


def record(level: int, module: str) -> logging.LogRecord:
    return logging.LogRecord(SERVE_LOGGER, level, module, 1, "failed", None, None)


def test_logged_errors_of_the_applications_modules_are_counted_once() -> None:
    first, counts, logger = Added(), Added(), logging.getLogger(SERVE_LOGGER)
    before = logger.filters[:]
    ErrorLogCounter.install(first)
    ErrorLogCounter.install(counts)
    try:
        logger.handle(record(logging.WARNING, unix_socket.__file__))
        logger.handle(record(logging.ERROR, unix_socket.__file__))
        logger.handle(record(logging.ERROR, serve.__file__))
    finally:
        logger.filters[:] = before
    assert (first.added, counts.added) == ({}, {(Counter.ERRORS_LOGGED, "unix_socket"): 1})


def test_an_error_that_cannot_be_counted_is_logged() -> None:
    class Failing(Added):
        def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
            raise RuntimeError("Ray is shutting down")

    assert ErrorLogCounter(Failing()).filter(record(logging.ERROR, unix_socket.__file__))


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
