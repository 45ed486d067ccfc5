"""Waits for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 300.0
MAX_PAUSE_S = 2.0


def until(condition: Callable[[], Any], what: str = "it did not happen", limit_s: float = LIMIT_S) -> Any:
    """The first true value of `condition`, asked again and again; fails naming `what` when there is none for long."""
    deadline = time.monotonic() + limit_s
    while (asked := time.monotonic()) < deadline:
        if found := condition():
            return found
        time.sleep(min(max(0.05, 2 * (time.monotonic() - asked)), MAX_PAUSE_S))  # the cores are for what it waits for
    raise AssertionError(f"not within {limit_s:g} s: {what}")
