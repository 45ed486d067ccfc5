"""Serve's log buffers through the start of libraries that set up logging for the whole process.

`logging.config.dictConfig` closes every handler of the process; vLLM calls it when it is imported, as of 0.32 when it
makes an engine. A file opens again with its next line. A `MemoryHandler`, which Serve puts before each replica's log
file, has lost its target for good: it writes nothing from then on and keeps every record, 2.8 KB a request. This module
must not know of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

SERVE_LOGGER = "ray.serve"


@contextmanager
def log_buffers_kept() -> Iterator[None]:
    """At its end Serve's buffers have the targets that they had at its beginning, and hold nothing back."""
    buffers = [handler for handler in logging.getLogger(SERVE_LOGGER).handlers if isinstance(handler, MemoryHandler)]
    targets = [buffer.target for buffer in buffers]
    try:
        yield
    finally:
        for buffer, target in zip(buffers, targets, strict=True):
            buffer.setTarget(target)
            buffer.flush()
