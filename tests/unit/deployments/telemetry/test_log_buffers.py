"""Serve's buffers go on writing after others have set up logging for the whole process."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Iterator
from contextlib import nullcontext
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

import pytest

from deployments.telemetry.log_buffers import SERVE_LOGGER, preserve_log_buffers

logger = logging.getLogger(SERVE_LOGGER)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "replica.log"


@pytest.fixture
def buffer(log: Path) -> Iterator[MemoryHandler]:
    """As Serve makes it for a replica: full with the first record."""
    made = MemoryHandler(capacity=1, target=RotatingFileHandler(log, maxBytes=10**6))
    before, level = logger.handlers[:], logger.level
    logger.handlers[:] = [logging.NullHandler(), made]
    logger.setLevel(logging.INFO)
    yield made
    logger.handlers[:] = before
    logger.setLevel(level)


def set_up_by_somebody_else() -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


@pytest.mark.parametrize("kept", [True, False])
def test_records_are_written_and_not_kept(kept: bool, buffer: MemoryHandler, log: Path) -> None:
    with preserve_log_buffers() if kept else nullcontext():
        logger.info("before")
        set_up_by_somebody_else()
        logger.info("while it starts")
        set_up_by_somebody_else()
    for number in range(20):
        logger.info("request %d", number)
    told = log.read_text().splitlines()
    if kept:
        assert told == ["before", "while it starts", *(f"request {number}" for number in range(20))]
        assert buffer.buffer == []
    else:
        assert told == ["before"]
        assert len(buffer.buffer) == 21


def test_what_fails_is_told_all_the_same(buffer: MemoryHandler, log: Path) -> None:
    @preserve_log_buffers()
    def start() -> None:
        set_up_by_somebody_else()
        logger.error("no weights")
        raise LookupError

    with pytest.raises(LookupError):
        start()
    assert log.read_text() == "no weights\n"
    assert buffer.target is not None


def test_it_serves_as_a_decorator_more_than_once(buffer: MemoryHandler, log: Path) -> None:
    """Of a replica's constructor."""
    start = preserve_log_buffers()(set_up_by_somebody_else)
    start()
    start()
    logger.info("up")
    assert log.read_text() == "up\n"


def test_a_logger_without_a_buffer_is_left_alone() -> None:
    before = logger.handlers[:]
    with preserve_log_buffers():
        pass
    assert logger.handlers == before
