"""Writes the result tables of README.md and docs/measurements.md from benchmarks/results: `python scripts/readme.py`.

Each table is between `<!-- NAME -->` and `<!-- /NAME -->`; a test compares them. `scripts/reference.py` writes the
pages that are generated from the code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reports import comparison, report
from benchmarks.reports import plan as report_plan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"


def tables() -> dict[Path, dict[str, str]]:
    """Returns Markdown tables by page and name."""
    results = report.results()
    return {
        README: {"results": comparison.markdown(report.RESULTS)},
        MEASUREMENTS: {"figures": report.markdown(results), "plan": report_plan.markdown(report.RESULTS)},
    }


def with_tables(text: str, made: Mapping[str, str]) -> str:
    """Returns `text` with the tables between their marks replaced. Raises ValueError if a mark is missing."""
    for name, table in made.items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not opening or not closing:
            raise ValueError(f"<!-- {name} --> and <!-- /{name} --> are missing from the text")
        text = f"{before}{opening}\n{table}\n\n{closing}{after}"
    return text


def main() -> int:
    for page, made in tables().items():
        page.write_text(with_tables(page.read_text(), made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
