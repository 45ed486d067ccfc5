"""Objects that must not be kept by reference cycles until the garbage collector runs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any


def assert_freed(scenario: Callable[[], Coroutine[Any, Any, weakref.ref[Any]]]) -> None:
    """Runs `scenario`, and asserts that the object of which it returns a reference is gone without a collection."""
    gc.disable()
    try:
        assert asyncio.run(scenario())() is None
    finally:
        gc.enable()
