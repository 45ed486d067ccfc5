"""One process for all scripts that Triton's interpreter runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.encoder.interpreter import Interpreted, interpreter


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    with interpreter() as run:
        yield run
