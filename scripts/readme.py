"""Writes the tables of README.md that are made from the code: `python scripts/readme.py`; a test compares them.

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`. It must not know what is in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.report_ladder import headline
from configs import reference
from deployments import routes

README = Path(__file__).resolve().parent.parent / "README.md"


def tables() -> dict[str, str]:
    """Name -> Markdown."""
    results = report.results()
    return {
        "headline": headline(results),
        "settings": reference.markdown(),
        "routes": routes.table(),
        "figures": report.markdown(results),
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
    README.write_text(with_tables(README.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
