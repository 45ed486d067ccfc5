"""`make fuzz` is 100,000 cases in process and 2,000 over HTTP, and what is part of `make test` a fiftieth of that."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import FUZZ_CASES
from tests.fuzz.shares import IN_PROCESS, OVER_HTTP

ROOT = Path(__file__).parents[2]


def test_the_shares_are_the_whole() -> None:
    wanted = re.search(r"--fuzz-cases \$\(or \$\(CASES\),(\d+)\)", (ROOT / "Makefile").read_text())
    assert wanted is not None
    for cases in (int(wanted[1]), 50 * FUZZ_CASES):
        assert sum(round(cases * share) for share in IN_PROCESS.values()) >= 100_000
        assert sum(round(cases * share) for share in OVER_HTTP.values()) == 2_000


def test_every_share_is_somebodys() -> None:
    """Each is named once in a fuzzer, so that none is counted that nobody runs."""
    sources = "".join(
        file.read_text() for file in Path(__file__).parent.glob("test_*.py") if file.name != Path(__file__).name
    )
    for table, shares in (("IN_PROCESS", IN_PROCESS), ("OVER_HTTP", OVER_HTTP)):
        for name in shares:
            assert sources.count(f'{table}["{name}"]') == 1, name
