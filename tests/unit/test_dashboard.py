"""docs/metrics.md and docs/grafana.json say what the definitions say, and every expression names what there is."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray.serve

from deployments.metrics import WITH_REASON, WITH_TIER, Count, Distribution, Level, tag_of
from scripts import dashboard, metrics

OURS = {name for kind in (Count, Level, Distribution) for one in kind for name in dashboard.exported(one)}
EXPRESSIONS = [line.expression for row in dashboard.rows() for panel in row.panels for line in panel.lines]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bray_[a-z_]+", expression))


def test_files_are_up_to_date() -> None:
    """`python scripts/metrics.py` writes them."""
    assert metrics.TABLES.read_text() == metrics.tables()
    assert json.loads(metrics.DASHBOARD.read_text()) == dashboard.dashboard()


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
    for kind in (Count, Level, Distribution):
        for one in kind:
            assert shown & set(dashboard.exported(one)), f"{one} is on no panel"


def test_a_metric_without_a_panel_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind: as whoever defines a new one finds it."""
    without = [row for row in dashboard.ROWS if row.title not in ("Language models", "Caches and routing", "Ingress")]
    monkeypatch.setattr(dashboard, "ROWS", tuple(without))
    others = dashboard.rows()[-1]
    assert others.title == "Others"
    found = {panel.title: [line.expression for line in panel.lines] for panel in others.panels}
    assert found["Embeddings loaded, per s"] == [dashboard.rate(Count.EMBEDDINGS_LOADED)]
    assert found["Cache hits, per s"] == [dashboard.rate(Count.CACHE_HITS, "tier")]
    assert found["Waiting tokens"] == [dashboard.level(Level.WAITING_TOKENS, "replica")]
    assert len(found["Ttft ms"]) == 3


def test_what_is_told_apart_is_shown_apart() -> None:
    for count in Count:
        if tag := tag_of(count):
            assert any(f"sum by ({tag}) (rate({dashboard.exported(count)[0]}" in one for one in EXPRESSIONS), count
    assert set(WITH_REASON) | set(WITH_TIER) == {count for count in Count if tag_of(count)}


def test_the_file_is_a_dashboard() -> None:
    found: dict[str, Any] = json.loads(metrics.DASHBOARD.read_text())
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
