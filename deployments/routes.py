"""Every route that the ingress knows, and what it does with it. What is not in the table is closed.

Several of vLLM's routes would fetch a URL by themselves or administrate the engine, so nothing passes that is not
listed, and what is for the operator only where `ingress.door.management_routes` opens it. The README's table is made
from this one. It must not know how a route is served.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from deployments.errors import ApiError


class Service(Enum):
    """What the ingress does with a request."""

    IMAGES = "served, with images"
    TEXT = "served, text only"
    PAGE = "the page"
    MANAGEMENT = "for the operator"
    CLOSED = "404"


@dataclass(frozen=True)
class Route:
    methods: tuple[str, ...]
    path: str
    service: Service
    note: str = ""


PAGE_FILES = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/main.js": "main.js",
    "/page/asking.js": "asking.js",
    "/page/pictures.js": "pictures.js",
    "/page/timing.js": "timing.js",
    "/page/cluster.js": "cluster.js",
    "/page/drawing.js": "drawing.js",
    "/page/icon.svg": "icon.svg",
}
"""Where the page's files are, and their names in `deployments/page`."""

CLUSTER = "/cluster"

ROUTES: tuple[Route, ...] = (
    Route(("GET",), "/", Service.PAGE, "for browsers; `ingress.page`"),
    Route(("GET",), "/page/{file}", Service.PAGE, "its files"),
    Route(("GET",), CLUSTER, Service.MANAGEMENT, "replicas, queues and scaling, as the page shows them"),
    Route(("POST",), "/v1/chat/completions", Service.IMAGES, "streamed and whole; images in any message"),
    Route(("POST",), "/tokenize", Service.IMAGES, "a chat with images counts them as the model does"),
    Route(("POST",), "/v1/completions", Service.TEXT),
    Route(("POST",), "/v1/responses", Service.TEXT, "images: 501, use /v1/chat/completions"),
    Route(("GET",), "/v1/responses/{id}", Service.TEXT, "vLLM keeps responses only where its store is switched on"),
    Route(("POST",), "/v1/responses/{id}/cancel", Service.TEXT, "as above"),
    Route(("GET",), "/v1/models", Service.TEXT),
    Route(("POST",), "/detokenize", Service.TEXT),
    Route(("GET",), "/health", Service.TEXT, "of one language model replica"),
    Route(("GET", "POST"), "/ping", Service.TEXT, "of one language model replica"),
    Route(("GET",), "/load", Service.MANAGEMENT, "of one language model replica"),
    Route(("GET",), "/version", Service.MANAGEMENT),
    Route(
        ("GET",),
        "/metrics",
        Service.MANAGEMENT,
        "vLLM's, of one replica; Ray exports all replicas' on its metrics port",
    ),
    Route(("GET",), "/docs", Service.MANAGEMENT),
    Route(("GET",), "/openapi.json", Service.MANAGEMENT, "only the routes served here"),
    Route(("POST",), "/score", Service.CLOSED, "no pooling models; also /v1/score"),
    Route(("POST",), "/v1/score", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/rerank", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/v1/rerank", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/v2/rerank", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/v1/embeddings", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/pooling", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/classify", Service.CLOSED, "no pooling models"),
    Route(("POST",), "/v1/audio/transcriptions", Service.CLOSED, "no audio"),
    Route(("POST",), "/v1/audio/translations", Service.CLOSED, "no audio"),
    Route(("POST",), "/v1/messages", Service.CLOSED, "vLLM would fetch its images by itself"),
    Route(("POST",), "/invocations", Service.CLOSED, "vLLM would fetch its images by itself"),
    Route(("POST",), "/scale_elastic_ep", Service.CLOSED, "administration"),
    Route(("POST",), "/is_scaling_elastic_ep", Service.CLOSED, "administration"),
)


def open_rows(path: str) -> list[Route]:
    """The rows that serve `path`, whatever their methods. A parameter of a path template counts as a value."""
    return [route for route in ROUTES if route.service is not Service.CLOSED and _matches(route.path, path)]


def open_route(method: str, path: str, *, management: bool) -> Route:
    """The table's row for this request; ApiError 404 or 405 where there is none, or where it is for the operator and
    `management` is off."""
    rows = [row for row in open_rows(path) if management or row.service is not Service.MANAGEMENT]
    if not rows:
        raise ApiError(404, f"{path} is not served here", code="not_found")
    for route in rows:
        if method in route.methods:
            return route
    allowed = ", ".join(sorted({name for route in rows for name in route.methods}))
    raise ApiError(405, f"{method} {path}: allowed are {allowed}", code="method_not_allowed")


def described(openapi: bytes) -> bytes:
    """Of vLLM's own description, in JSON, what is open here."""
    document = json.loads(openapi)
    document["paths"] = {path: operations for path, operations in document["paths"].items() if open_rows(path)}
    return json.dumps(document).encode()


def _matches(pattern: str, path: str) -> bool:
    parts, given = pattern.split("/"), path.split("/")
    return len(parts) == len(given) and all(
        (part.startswith("{") and value != "") or part == value for part, value in zip(parts, given, strict=True)
    )


def table() -> str:
    """The routes as a Markdown table."""
    rows = [f"| {' '.join(r.methods)} | `{r.path}` | {r.service.value} | {r.note} |" for r in ROUTES]
    return "\n".join(["| | route | | |", "|---|---|---|---|", *rows])
