"""Keys of two clients, and a pause before a minute ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.hostile.ingress_server import KEY, OTHER_KEY


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice {KEY}\nbob {OTHER_KEY}\n")
    return file


@pytest.fixture
def early_in_a_minute() -> None:
    """Quotas begin anew with every minute of the clock: not in the middle of a test."""
    left = 60 - time.time() % 60
    if left < 5:
        time.sleep(left)
