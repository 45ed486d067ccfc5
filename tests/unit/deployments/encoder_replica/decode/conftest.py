"""The event loop of the pools of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """The one event loop that a pool is used from."""
    with asyncio.Runner() as runner:
        yield runner
