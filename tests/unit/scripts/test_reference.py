"""The generated pages are those that the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import reference


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_regenerating_changes_nothing(path: Path) -> None:
    assert path.read_text() == reference.pages()[path], "run python scripts/reference.py"
