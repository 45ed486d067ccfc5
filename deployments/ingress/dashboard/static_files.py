"""The web page at `/`: static files of the folder `page`, with headers that block content of other origins.

The page's scripts call this server's routes.
"""

from __future__ import annotations

import json
from importlib import resources

from pydantic import JsonValue

from deployments.common.api_error import ApiError
from deployments.common.messages import ResponseHead
from deployments.ingress.http.routes import PAGE_FILES

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-cache"),
)


class Page:
    """The page's files in memory."""

    def __init__(self, *, enabled: bool) -> None:
        """`enabled`: whether the page is served."""
        folder = resources.files(__package__) / "page"
        self._files = {
            path: (MEDIA_TYPES[name.rpartition(".")[2]], (folder / name).read_bytes())
            for path, name in (PAGE_FILES if enabled else {}).items()
        }

    def response(self, path: str, *, root_path: str) -> tuple[ResponseHead, bytes]:
        """Returns the file at `path`, which is empty if the URL ends with the route prefix: then it redirects to the
        prefix with a slash, since the page's URLs are relative. Raises ApiError 404 if there is no such file."""
        file = self._files.get(path or "/")
        if file is None:
            raise ApiError(404, f"{path or '/'} is not served here", code="not_found")
        if not path:
            return _head(307, MEDIA_TYPES["html"], ("location", f"{root_path}/")), b""
        media_type, body = file
        return _head(200, media_type), body


def json_answer(value: JsonValue) -> tuple[ResponseHead, bytes]:
    """Returns `value` as a JSON response with the page's headers."""
    return _head(200, "application/json"), json.dumps(value).encode()


def _head(status: int, media_type: str, *more: tuple[str, str]) -> ResponseHead:
    headers = [("content-type", media_type), *HEADERS, *more]
    return ResponseHead(status, [(name.encode(), value.encode()) for name, value in headers])
