"""Writes the tables of README.md and docs/measurements.md that are made from code and results:
`python scripts/readme.py`; a test compares them.

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`. It must not know what is in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report, report_plan
from benchmarks.report_ladder import headline
from configs import reference
from deployments import routes

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"


def tables() -> dict[Path, dict[str, str]]:
    """Page -> name -> Markdown."""
    results = report.results()
    return {
        README: {"headline": headline(results), "settings": reference.markdown(), "routes": routes.table()},
        MEASUREMENTS: {"figures": report.markdown(results), "plan": report_plan.markdown(report.RESULTS)},
    }


def with_tables(text: str, made: Mapping[str, str]) -> str:
    """`text` with what stands between each table's marks replaced. Raises ValueError where marks are missing."""
    for name, table in made.items():
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        if not opening or not closing:
            raise ValueError(f"<!-- {name} --> and <!-- /{name} --> must stand in the text")
        text = f"{before}{opening}\n{table}\n\n{closing}{after}"
    return text


def main() -> int:
    for page, made in tables().items():
        page.write_text(with_tables(page.read_text(), made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
