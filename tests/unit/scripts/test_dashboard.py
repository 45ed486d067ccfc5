"""Every expression of the Grafana dashboard names metrics that exist, and every metric has a panel."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray.serve

from deployments.telemetry.metrics import LABELS, Counter, Gauge, Histogram
from scripts import dashboard

OURS = {name for kind in (Counter, Gauge, Histogram) for one in kind for name in dashboard.exported(one)}
EXPRESSIONS = [line.expression for row in dashboard.rows() for panel in row.panels for line in panel.lines]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bray_[a-z_]+", expression))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_there_is(expression: str) -> None:
    found = names(expression)
    assert found
    for name in found - OURS:
        # Serve's own: a literal in its sources. Levels keep their name, counters get one more ending.
        own = name.removeprefix("ray_")
        assert any(f'"{own}"' in source for source in serve_sources()), f"{name} is nobody's"
    assert [expression.count(mark) for mark in "({["] == [expression.count(mark) for mark in ")}]"]


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for expression in EXPRESSIONS for name in names(expression)}
    for kind in (Counter, Gauge, Histogram):
        for one in kind:
            assert shown & set(dashboard.exported(one)), f"{one} is on no panel"


def test_a_metric_without_a_panel_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind: as whoever defines a new one finds it."""
    without = [row for row in dashboard.ROWS if row.title not in ("Language models", "Caches and routing", "Ingress")]
    monkeypatch.setattr(dashboard, "ROWS", tuple(without))
    others = dashboard.rows()[-1]
    assert others.title == "Others"
    found = {panel.title: [line.expression for line in panel.lines] for panel in others.panels}
    assert found["Embeddings loaded, per s"] == [dashboard.rate(Counter.EMBEDDINGS_LOADED)]
    assert found["Cache hits, per s"] == [dashboard.rate(Counter.CACHE_HITS, "tier")]
    assert found["Ingress queued tokens"] == [dashboard.gauge(Gauge.INGRESS_QUEUED_TOKENS, "replica")]
    assert len(found["Time to first token seconds"]) == 3


def test_what_is_told_apart_is_shown_apart() -> None:
    for counter, label in LABELS.items():
        shown = rf"sum by \({label}\) \((rate\()?{dashboard.exported(counter)[0]}"
        assert any(re.search(shown, one) for one in EXPRESSIONS), counter


def test_the_file_is_a_dashboard() -> None:
    found: dict[str, Any] = dashboard.dashboard()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    taken = {(x, y) for place in places for x in range(place["x"], place["x"] + place["w"])
             for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
    assert len(taken) == sum(place["w"] * place["h"] for place in places), "panels overlap"
    assert all(place["x"] + place["w"] <= 24 for place in places)
    variables = {one["name"] for one in found["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\b", json.dumps(panels))) == variables


@cache
def serve_sources() -> list[str]:
    folder = Path(ray.serve.__file__).parent
    return [file.read_text() for file in folder.rglob("*.py") if "tests" not in file.parts]
