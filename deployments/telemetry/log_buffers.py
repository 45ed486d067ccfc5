"""Protection of Serve's log buffers from libraries that configure logging for the whole process.

`logging.config.dictConfig` closes every handler of the process; vLLM calls it when it is imported, as of 0.32 when it
creates an engine. A file handler reopens at its next record. A `MemoryHandler`, which Serve puts in front of each
replica's log file, loses its target permanently: it writes nothing and keeps every record, 2.8 KB per request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

SERVE_LOGGER = "ray.serve"


@contextmanager
def preserve_log_buffers() -> Iterator[None]:
    """Restores the targets of Serve's log buffers at its end, and flushes the buffers."""
    buffers = [handler for handler in logging.getLogger(SERVE_LOGGER).handlers if isinstance(handler, MemoryHandler)]
    targets = [buffer.target for buffer in buffers]
    try:
        yield
    finally:
        for buffer, target in zip(buffers, targets, strict=True):
            buffer.setTarget(target)
            buffer.flush()
