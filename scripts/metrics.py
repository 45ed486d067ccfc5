"""Writes docs/metrics.md and docs/grafana.json from the metrics' definitions: `python scripts/metrics.py`.

A test compares them. It must not know what is counted where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deployments.metrics import BOUNDS_MS, Count, Distribution, Level, tag_of
from scripts.dashboard import dashboard, exported, rows

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLES, DASHBOARD = DOCS / "metrics.md", DOCS / "grafana.json"

_INTRODUCTION = """# Metrics

Ray exports them for Prometheus on every node, on the port that `--metrics-export-port` of `ray start` names;
[Ray's documentation](https://docs.ray.io/en/latest/cluster/metrics.html) says how Prometheus finds the nodes, on
Kubernetes too. All carry Serve's tags `application`, `deployment` and `replica`; what has not happened yet is not
there. vLLM's own are at `/metrics` of the server, of one language model at a time, where
`ingress.door.management_routes` is open.

[grafana.json](grafana.json) is a dashboard of all of them: Dashboards → New → Import in Grafana. This page and the
dashboard are written by `python scripts/metrics.py`.
"""


def tables() -> str:
    """docs/metrics.md."""
    parts = [_INTRODUCTION]
    parts.append("## Counters\n\n| name | apart by | |\n|---|---|---|")
    parts += [f"| `{exported(one)[0]}` | {f'`{tag}`' if (tag := tag_of(one)) else ''} | {one.value} |" for one in Count]
    parts.append("\n## Levels\n\n| name | |\n|---|---|")
    parts += [f"| `{exported(one)[0]}` | {one.value} |" for one in Level]
    bounds = ", ".join(f"{bound:g}" for bound in BOUNDS_MS)
    parts.append(
        f"\n## Times\n\nHistograms in milliseconds, with `_bucket`, `_sum` and `_count`; buckets end at {bounds}.\n"
    )
    parts.append("| name | |\n|---|---|")
    parts += [f"| `ray_{one.metric}` | {one.value} |" for one in Distribution]
    parts.append("\n## The dashboard's expressions\n")
    for row in rows():
        parts.append(f"### {row.title}\n\n| panel | expression |\n|---|---|")
        parts += [
            f"| {panel.title}{f', {line.legend}' if len(panel.lines) > 1 else ''} | `{line.expression}` |"
            for panel in row.panels
            for line in panel.lines
        ]
        parts.append("")
    return "\n".join(parts)


def main() -> int:
    TABLES.write_text(tables())
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
