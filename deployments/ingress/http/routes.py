"""The route table of the ingress. A route that is not listed is closed.

The table is an allowlist because some of vLLM's routes fetch URLs or administer the engine. Management routes are open
only if `ingress.auth.management_routes` allows it. docs/routes.md is generated from this table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from deployments.common.api_error import ApiError
from deployments.ingress.http.image_parts import BodyFormat


class Service(Enum):
    """What the ingress does with a request."""

    IMAGES = "served, with images"
    TEXT = "served, text only"
    PAGE = "the page"
    HEALTH = "answered by the ingress"
    STORED = "stored responses"
    MANAGEMENT = "for the operator"


@dataclass(frozen=True)
class Route:
    """A row of the table. `path` may hold parameters, such as `{id}`."""

    methods: tuple[str, ...]
    path: str
    service: Service
    note: str = ""
    body_format: BodyFormat = BodyFormat.CHAT
    """Format of the bodies, if `service` is IMAGES."""


_FILES = ("style.css", "main.js", "asking.js", "files.js", "timing.js", "cluster.js", "drawing.js", "icon.svg")
PAGE_FILES = {"/": "index.html"} | {f"/page/{name}": name for name in _FILES}
"""URL paths of the page's files, and their names in `deployments/ingress/dashboard/page`."""

CLUSTER = "/cluster"
COUNTING = ("/tokenize", "/v1/messages/count_tokens")
"""Routes that run no model and need no embeddings, only the headers of images."""

ROUTES: tuple[Route, ...] = (
    Route(("GET",), "/", Service.PAGE, "for browsers; `ingress.web_ui`"),
    Route(("GET",), "/page/{file}", Service.PAGE, "its files"),
    Route(("GET",), CLUSTER, Service.MANAGEMENT, "replicas, queues and scaling, as the page shows them"),
    Route(("POST",), "/v1/chat/completions", Service.IMAGES, "streamed and whole; images in any message"),
    Route(
        ("POST",),
        "/v1/responses",
        Service.IMAGES,
        "streamed and whole; images in messages and tool outputs; responses are stored for `previous_response_id`",
        BodyFormat.RESPONSES,
    ),
    Route(("GET", "DELETE"), "/v1/responses/{id}", Service.STORED, "of the same key; `ingress.stored_responses_bytes`"),
    Route(("GET",), "/v1/responses/{id}/input_items", Service.STORED, "those of earlier turns included"),
    Route(
        ("POST",),
        "/v1/messages",
        Service.IMAGES,
        "Anthropic's API, streamed and whole; images in user messages and tool results",
        BodyFormat.MESSAGES,
    ),
    Route(
        ("POST",), "/v1/messages/count_tokens", Service.IMAGES, "counts images as the model does", BodyFormat.MESSAGES
    ),
    Route(("POST",), "/tokenize", Service.IMAGES, "a chat with images counts them as the model does"),
    Route(("POST",), "/v1/completions", Service.TEXT),
    Route(("GET",), "/v1/models", Service.TEXT),
    Route(("POST",), "/detokenize", Service.TEXT),
    Route(("GET",), "/health", Service.HEALTH, "200; 503 while no language model is available"),
    Route(("GET", "POST"), "/ping", Service.HEALTH, "the same; a body is not read"),
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
)


def open_routes(path: str) -> list[Route]:
    """Returns the rows that serve `path`, for any method. A path parameter matches any value that is not empty."""
    return [route for route in ROUTES if _matches(route.path, path)]


def open_route(method: str, path: str, *, management: bool) -> Route:
    """Returns the row for this request. Management routes match only if `management` is set.

    Raises:
        ApiError: 404 for an unknown path, 405 for another method.
    """
    rows = [row for row in open_routes(path) if management or row.service is not Service.MANAGEMENT]
    if not rows:
        raise ApiError(404, f"{path} is not served here", code="not_found")
    for route in rows:
        if method in route.methods:
            return route
    allowed = ", ".join(sorted({name for route in rows for name in route.methods}))
    raise ApiError(405, f"{method} {path}: allowed are {allowed}", code="method_not_allowed")


def filter_openapi(openapi: bytes) -> bytes:
    """Returns vLLM's OpenAPI document (JSON) without the paths that are closed here."""
    document = json.loads(openapi)
    document["paths"] = {path: operations for path, operations in document["paths"].items() if open_routes(path)}
    return json.dumps(document).encode()


def _matches(pattern: str, path: str) -> bool:
    parts, values = pattern.split("/"), path.split("/")
    return len(parts) == len(values) and all(
        (part.startswith("{") and value != "") or part == value for part, value in zip(parts, values, strict=True)
    )
