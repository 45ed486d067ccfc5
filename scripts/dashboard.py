"""The Grafana dashboard: rows of panels whose expressions are made from the metrics' definitions.

A panel names a metric by its definition, so that none can name one that is not there. It must not know how anything is
counted. `scripts/metrics.py` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.metrics import Count, Distribution, Level, tag_of

WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's units: 24 are the whole width."""
_WHERE = '{application=~"$application"}'
_OVER = "[$__rate_interval]"


@dataclass(frozen=True)
class Line:
    """One expression and what its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    unit: str = "short"
    """Grafana's name of it."""
    meaning: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def exported(metric: Count | Level | Distribution) -> tuple[str, ...]:
    """The names under which Prometheus has it."""
    name = f"ray_{metric.metric}"
    if isinstance(metric, Count):
        return (f"{name}_total",)
    if isinstance(metric, Level):
        return (name,)
    return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count"))


def rate(count: Count, by: str = "") -> str:
    """Per second, added up over replicas, apart by a tag."""
    (name,) = exported(count)
    return f"sum{f' by ({by})' if by else ''} (rate({name}{_WHERE}{_OVER}))"


def share(part: Count, *whole: Count) -> str:
    """Of what is in `whole`; what was never counted is nothing, and not no answer."""
    return f"{rate(part)} / ({' + '.join(f'({rate(one)} or vector(0))' for one in whole)})"


def level(one: Level, by: str = "") -> str:
    (name,) = exported(one)
    return f"sum{f' by ({by})' if by else ''} ({name}{_WHERE})"


def quantile(distribution: Distribution, of: float) -> str:
    """Milliseconds that so large a share stays under, to the width of a bucket."""
    bucket = exported(distribution)[0]
    return f"histogram_quantile({of}, sum by (le) (rate({bucket}{_WHERE}{_OVER})))"


def serve(name: str, by: str) -> str:
    """A level of Ray Serve's own."""
    return f"sum by ({by}) (ray_{name}{_WHERE})"


def _rate(title: str, *counts: tuple[Count, str], unit: str = "short") -> Panel:
    return Panel(title, tuple(Line(rate(count), legend) for count, legend in counts), unit)


def _by(title: str, count: Count, tag: str) -> Panel:
    return Panel(title, (Line(rate(count, tag), f"{{{{{tag}}}}}"),), meaning=count.value)


def _times(distribution: Distribution, title: str) -> Panel:
    lines = tuple(
        Line(quantile(distribution, of), name) for of, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
    )
    return Panel(title, lines, "ms", distribution.value)


def _of_serve(title: str, name: str) -> Panel:
    return Panel(title, (Line(serve(name, "deployment"), "{{deployment}}"),))


ROWS = (
    Row(
        "Ingress",
        (
            _times(Distribution.TTFT_MS, "Time to first token"),
            Panel(
                "Requests that wait",
                (Line(level(Level.WAITING_REQUESTS), "requests"),),
                meaning=Level.WAITING_REQUESTS.value,
            ),
            Panel(
                "Visual tokens at the ingress",
                (Line(level(Level.WAITING_TOKENS), "in line"), Line(level(Level.IN_FLIGHT_TOKENS), "in flight")),
            ),
            _rate("Visual tokens admitted, per s", (Count.ADMITTED_TOKENS, "tokens")),
            _by("Requests shed, per s", Count.SHED_REQUESTS, "reason"),
            _by("Visual tokens shed, per s", Count.SHED_TOKENS, "reason"),
            _times(Distribution.FETCH_MS, "Fetching images"),
            _times(Distribution.ADMISSION_MS, "Waiting for a turn"),
            _rate("Faults, per s", (Count.REPLICAS_LOST, "replicas lost"), (Count.TRIES_AGAIN, "tries again")),
        ),
    ),
    Row(
        "Encoders",
        (
            Panel(
                "Queue of a replica, visual tokens",
                (Line(level(Level.QUEUED_TOKENS, "replica"), "{{replica}}"),),
                meaning=Level.QUEUED_TOKENS.value,
            ),
            _rate("Visual tokens encoded, per s", (Count.ENCODED_TOKENS, "all"), (Count.REPLAYED_TOKENS, "by graphs")),
            Panel(
                "Packing efficiency",
                (Line(share(Count.REPLAYED_TOKENS, Count.REPLAYED_TOKENS, Count.PADDING_TOKENS), "tokens of images"),),
                "percentunit",
                "The share of what graphs were replayed for that is no padding.",
            ),
            Panel(
                "Batches by graph",
                (Line(share(Count.GRAPH_REPLAYS, Count.GRAPH_REPLAYS, Count.EAGER_RUNS), "replayed"),),
                "percentunit",
                "The others ran eagerly, for the reasons beside.",
            ),
            _by("Batches without a graph, per s", Count.EAGER_RUNS, "reason"),
            _rate("Graphs, per s", (Count.GRAPH_CAPTURES, "captured"), (Count.GRAPH_REFUSALS, "refused")),
            _times(Distribution.PREPROCESS_MS, "Decoding an image"),
            _times(Distribution.QUEUE_MS, "Waiting for the GPU"),
            _times(Distribution.ENCODE_MS, "Encoding a batch"),
            _rate(
                "Images, per s",
                (Count.IMAGES_ENCODED, "encoded"),
                (Count.IMAGES_REFUSED, "refused"),
                (Count.QUEUE_FULL, "queue full"),
            ),
            _rate("Batches tried again, per s", (Count.BATCHES_RETRIED, "batches")),
            _rate(
                "Ways round what was prepared, per s",
                (Count.GRID_MISSES, "sizes not met before"),
                (Count.GRID_HITS, "sizes met before"),
                (Count.PIXELS_PIPED, "pixels through a pipe"),
            ),
        ),
    ),
    Row(
        "Caches and routing",
        (
            Panel(
                "Hit rate",
                (Line(share(Count.CACHE_HITS, Count.CACHE_HITS, Count.CACHE_MISSES), "of the images at encoders"),),
                "percentunit",
            ),
            _by("Hits by tier, per s", Count.CACHE_HITS, "tier"),
            _rate(
                "Not in a cache, per s",
                (Count.CACHE_MISSES, "misses"),
                (Count.ENCODINGS_SHARED, "shared at an ingress"),
            ),
            _by("Calls spilled, per s", Count.CALLS_SPILLED, "reason"),
        ),
    ),
    Row(
        "Language models",
        (
            _times(Distribution.TRANSFER_MS, "Transfer of embeddings"),
            _by("Embeddings by their way, per s", Count.EMBEDDINGS_ARRIVED, "reason"),
            _by("Bytes of embeddings by their way, per s", Count.EMBEDDING_BYTES_ARRIVED, "reason"),
            _rate("Bytes that engines loaded, per s", (Count.EMBEDDING_BYTES_LOADED, "bytes"), unit="bytes"),
            Panel(
                "Until an engine has loaded one, mean",
                (Line(f"{rate(Count.LOAD_MS)} / {rate(Count.EMBEDDINGS_LOADED)}", "from its being ready"),),
                "ms",
            ),
            _rate(
                "Past shared memory, per s",
                (Count.EMBEDDINGS_UNSHARED, "no room in it"),
                (Count.TRANSFERS_FAILED, "requests tried again"),
            ),
            _times(Distribution.FIRST_TOKEN_MS, "From arrival to the first token"),
        ),
    ),
    Row(
        "Replicas (Ray Serve's own)",
        (
            _of_serve("Wanted", "serve_autoscaling_target_replicas"),
            _of_serve("Healthy", "serve_deployment_replica_healthy"),
            _of_serve("Calls at the handles", "serve_deployment_queued_queries"),
        ),
    ),
)


def rows() -> tuple[Row, ...]:
    """ROWS, and one more for the metrics that have no panel there."""
    shown = " ".join(line.expression for row in ROWS for panel in row.panels for line in panel.lines)
    left = [one for kind in (Count, Level, Distribution) for one in kind if exported(one)[0] not in shown]
    return (*ROWS, Row("Others", tuple(map(_plain, left)))) if left else ROWS


def _plain(one: Count | Level | Distribution) -> Panel:
    title = one.name.lower().replace("_", " ").capitalize()
    if isinstance(one, Distribution):
        return _times(one, title)
    if isinstance(one, Level):
        return Panel(title, (Line(level(one, "replica"), "{{replica}}"),), meaning=one.value)
    tag = tag_of(one)
    return _by(f"{title}, per s", one, tag) if tag else _rate(f"{title}, per s", (one, "all"))


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "title": "vitray",
        "uid": "vitray",
        "tags": ["vitray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _application()]},
        "panels": list(_panels(rows())),
    }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    at, number = 0, 1
    for row in rows:
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": at, "w": 24, "h": 1}}  # fmt: skip
        at, number = at + 1, number + 1
        for place, panel in enumerate(row.panels):
            across, down = place % (24 // WIDTH), place // (24 // WIDTH)
            yield _panel(panel, number, {"x": across * WIDTH, "y": at + down * HEIGHT, "w": WIDTH, "h": HEIGHT})
            number += 1
        at += -(-len(row.panels) // (24 // WIDTH)) * HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": line.expression, "legendFormat": line.legend}
            for index, line in enumerate(panel.lines)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _application() -> dict[str, Any]:
    (counted,) = exported(Count.ADMITTED_TOKENS)
    return {
        "name": "application",
        "label": "Application",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values({counted}, application)", "refId": "applications"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
