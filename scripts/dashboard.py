"""The Grafana dashboard: rows of panels whose expressions are generated from the metric definitions.

A panel refers to a metric by its definition, so it cannot name a metric that does not exist. `scripts/reference.py`
writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.telemetry.metrics import LABELS, Counter, Gauge, Histogram

WIDTH, HEIGHT = 8, 7
"""Size of a panel in Grafana's units; the dashboard is 24 wide."""
_WHERE = '{application=~"$application"}'
_OVER = "[$__rate_interval]"


@dataclass(frozen=True)
class Line:
    """One expression and the legend of its lines."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    unit: str = "short"
    """Grafana's name of the unit."""
    meaning: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def exported(metric: Counter | Gauge | Histogram) -> tuple[str, ...]:
    """Returns the names under which Prometheus stores the metric."""
    name = f"ray_{metric.metric}"
    if isinstance(metric, Counter):
        return (f"{name}_total",)
    if isinstance(metric, Gauge):
        return (name,)
    return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count"))


def rate(count: Counter, by: str = "") -> str:
    """Returns the expression for events per second, summed over replicas and grouped by the label `by`."""
    (name,) = exported(count)
    return f"sum{f' by ({by})' if by else ''} (rate({name}{_WHERE}{_OVER}))"


def share(part: Counter, *whole: Counter) -> str:
    """Returns the expression for the ratio of `part` to `whole`; counters without samples count as 0."""
    return f"{rate(part)} / ({' + '.join(f'({rate(one)} or vector(0))' for one in whole)})"


def gauge(one: Gauge, by: str = "") -> str:
    (name,) = exported(one)
    return f"sum{f' by ({by})' if by else ''} ({name}{_WHERE})"


def quantile(distribution: Histogram, of: float) -> str:
    """Returns the expression for a quantile of the durations in seconds, to the width of a bucket."""
    bucket = exported(distribution)[0]
    return f"histogram_quantile({of}, sum by (le) (rate({bucket}{_WHERE}{_OVER})))"


def serve(name: str, by: str) -> str:
    """Returns the expression for a gauge of Ray Serve, summed by a label."""
    return f"sum by ({by}) (ray_{name}{_WHERE})"


def _rate(title: str, *counts: tuple[Counter, str], unit: str = "short") -> Panel:
    return Panel(title, tuple(Line(rate(count), legend) for count, legend in counts), unit)


def _by(title: str, count: Counter, tag: str) -> Panel:
    return Panel(title, (Line(rate(count, tag), f"{{{{{tag}}}}}"),), meaning=count.value)


def _times(distribution: Histogram, title: str) -> Panel:
    lines = tuple(
        Line(quantile(distribution, of), name) for of, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
    )
    return Panel(title, lines, "s", distribution.value)


def _of_serve(title: str, name: str) -> Panel:
    return Panel(title, (Line(serve(name, "deployment"), "{{deployment}}"),))


ROWS = (
    Row(
        "Ingress",
        (
            _times(Histogram.TIME_TO_FIRST_TOKEN_SECONDS, "Time to first token"),
            Panel(
                "Requests waiting",
                (Line(gauge(Gauge.INGRESS_WAITING_REQUESTS), "requests"),),
                meaning=Gauge.INGRESS_WAITING_REQUESTS.value,
            ),
            Panel(
                "Visual tokens at the ingress",
                (
                    Line(gauge(Gauge.INGRESS_QUEUED_TOKENS), "queued"),
                    Line(gauge(Gauge.INGRESS_IN_FLIGHT_TOKENS), "in flight"),
                ),
            ),
            Panel(
                "Bytes held", (Line(gauge(Gauge.INGRESS_HELD_BYTES), "bytes"),), "bytes", Gauge.INGRESS_HELD_BYTES.value
            ),
            _rate("Visual tokens admitted, per s", (Counter.ADMITTED_TOKENS, "tokens")),
            _by("Requests shed, per s", Counter.SHED_REQUESTS, "reason"),
            _by("Visual tokens shed, per s", Counter.SHED_TOKENS, "reason"),
            _times(Histogram.FETCH_SECONDS, "Fetching images"),
            _times(Histogram.ADMISSION_SECONDS, "Admission queue"),
            _rate("Faults, per s", (Counter.REPLICAS_LOST, "replicas lost"), (Counter.REQUEST_RETRIES, "retries")),
        ),
    ),
    Row(
        "Encoders",
        (
            Panel(
                "Queue of a replica, visual tokens",
                (Line(gauge(Gauge.ENCODER_QUEUED_TOKENS, "replica"), "{{replica}}"),),
                meaning=Gauge.ENCODER_QUEUED_TOKENS.value,
            ),
            _rate("Visual tokens encoded, per s", (Counter.ENCODED_TOKENS, "all"), (Counter.GRAPH_TOKENS, "by graphs")),
            Panel(
                "Packing efficiency",
                (
                    Line(
                        share(Counter.GRAPH_TOKENS, Counter.GRAPH_TOKENS, Counter.GRAPH_PADDING_TOKENS),
                        "tokens of images",
                    ),
                ),
                "percentunit",
                "The share of what graphs were replayed for that is no padding.",
            ),
            Panel(
                "Batches by graph",
                (Line(share(Counter.GRAPH_REPLAYS, Counter.GRAPH_REPLAYS, Counter.EAGER_RUNS), "replayed"),),
                "percentunit",
                "The others ran eagerly, for the reasons beside.",
            ),
            _by("Batches without a graph, per s", Counter.EAGER_RUNS, "reason"),
            Panel(
                "Encoders without fused kernels",
                (Line(f"sum by (reason) ({exported(Counter.FUSED_KERNEL_FALLBACKS)[0]}{_WHERE})", "{{reason}}"),),
                meaning=Counter.FUSED_KERNEL_FALLBACKS.value,
            ),
            _rate("Graphs, per s", (Counter.GRAPH_CAPTURES, "captured"), (Counter.GRAPH_CAPTURE_FAILURES, "failed")),
            _times(Histogram.PREPROCESS_SECONDS, "Decoding an image"),
            _times(Histogram.ENCODER_QUEUE_SECONDS, "Waiting for the GPU"),
            _times(Histogram.ENCODE_SECONDS, "Encoding a batch"),
            Panel(
                "Images, sounds and videos, per s",
                (
                    Line(rate(Counter.IMAGES_ENCODED, "medium"), "{{medium}}"),
                    Line(rate(Counter.IMAGES_REFUSED, "medium"), "{{medium}} refused"),
                    Line(rate(Counter.ENCODER_REJECTIONS), "queue full"),
                ),
            ),
            _rate(
                "Retries, per s",
                (Counter.BATCHES_RETRIED, "batches"),
                (Counter.DECODERS_LOST, "files whose decoder ended"),
            ),
            _rate(
                "Cache misses of positions and pixels, per s",
                (Counter.GEOMETRY_CACHE_MISSES, "new image sizes"),
                (Counter.GEOMETRY_CACHE_HITS, "known image sizes"),
                (Counter.PIXEL_SHM_FALLBACKS, "pixels sent through a pipe"),
            ),
        ),
    ),
    Row(
        "Caches and routing",
        (
            Panel(
                "Hit rate",
                (
                    Line(
                        share(Counter.CACHE_HITS, Counter.CACHE_HITS, Counter.CACHE_MISSES), "of the images at encoders"
                    ),
                ),
                "percentunit",
            ),
            _by("Hits by tier, per s", Counter.CACHE_HITS, "tier"),
            _rate(
                "Cache misses, per s",
                (Counter.CACHE_MISSES, "misses"),
                (Counter.COALESCED_ENCODES, "coalesced at an ingress"),
            ),
            _by("Affinity spills, per s", Counter.AFFINITY_SPILLS, "target"),
        ),
    ),
    Row(
        "Language models",
        (
            _times(Histogram.TRANSFER_SECONDS, "Transfer of embeddings"),
            _by("Embeddings received by path, per s", Counter.EMBEDDINGS_RECEIVED, "path"),
            _by("Embedding bytes received by path, per s", Counter.EMBEDDING_BYTES_RECEIVED, "path"),
            _rate("Embedding bytes loaded by engines, per s", (Counter.EMBEDDING_BYTES_LOADED, "bytes"), unit="bytes"),
            _times(Histogram.EMBEDDING_LOAD_SECONDS, "Loading an embedding into the engine"),
            _rate(
                "Shared memory misses, per s",
                (Counter.EMBEDDING_SHM_FALLBACKS, "shared memory full"),
                (Counter.EMBEDDINGS_EVICTED_UNREAD, "evicted unread"),
                (Counter.TRANSFER_FAILURES, "requests retried"),
            ),
            _times(Histogram.LLM_FIRST_TOKEN_SECONDS, "From arrival to the first token"),
        ),
    ),
    Row(
        "Replicas (Ray Serve's own)",
        (
            _of_serve("Target", "serve_autoscaling_target_replicas"),
            _of_serve("Healthy", "serve_deployment_replica_healthy"),
            _of_serve("Queued at the handles", "serve_deployment_queued_queries"),
        ),
    ),
)


def rows() -> tuple[Row, ...]:
    """Returns ROWS, and another row for the metrics that have no panel in them."""
    shown = " ".join(line.expression for row in ROWS for panel in row.panels for line in panel.lines)
    left = [one for kind in (Counter, Gauge, Histogram) for one in kind if exported(one)[0] not in shown]
    return (*ROWS, Row("Others", tuple(map(_plain, left)))) if left else ROWS


def _plain(one: Counter | Gauge | Histogram) -> Panel:
    title = one.name.lower().replace("_", " ").capitalize()
    if isinstance(one, Histogram):
        return _times(one, title)
    if isinstance(one, Gauge):
        return Panel(title, (Line(gauge(one, "replica"), "{{replica}}"),), meaning=one.value)
    tag = LABELS.get(one)
    return _by(f"{title}, per s", one, tag) if tag else _rate(f"{title}, per s", (one, "all"))


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON model."""
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
    (counted,) = exported(Counter.ADMITTED_TOKENS)
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
