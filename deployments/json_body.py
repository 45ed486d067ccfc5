"""A request's body as JSON, in and out. It must not know what the fields mean."""

from __future__ import annotations

import json

from deployments.chat_images import Body
from deployments.errors import ApiError

MAX_JSON_VALUES = 1_000_000
"""In a request's body, told by its commas and brackets, those in texts too. In memory each is many times larger."""


def json_object(data: bytes) -> Body:
    """Raises ApiError 413 for too many values, 400 for what is no JSON object."""
    # No shorter body has so many, and an image's takes a while to look through.
    num_values = 0 if len(data) <= MAX_JSON_VALUES else sum(map(data.count, (b",", b"[", b"{")))
    if num_values > MAX_JSON_VALUES:
        told = f"the request body has about {num_values} JSON values, the limit is {MAX_JSON_VALUES}"
        raise ApiError(413, told, code="body_too_large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the request body is not valid JSON") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def written(body: Body) -> bytes:
    """Raises ApiError 400 for what is nested too deeply."""
    try:
        return json.dumps(body).encode()
    except RecursionError as error:  # by a few levels deeper than could be read
        raise ApiError(400, "the request body is nested too deeply") from error
