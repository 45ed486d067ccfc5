"""The web page at `/`: static files of the folder `page`, with headers that block content of other origins.

The page's scripts call this server's routes.
"""

from __future__ import annotations

from importlib import resources

from starlette.responses import Response

from deployments.common.api_error import ApiError
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
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Page:
    """The page's files in memory."""

    def __init__(self, *, enabled: bool) -> None:
        """`enabled`: whether the page is served."""
        folder = resources.files(__package__) / "page"
        self._files = {
            path: (MEDIA_TYPES[name.rpartition(".")[2]], (folder / name).read_bytes())
            for path, name in (PAGE_FILES if enabled else {}).items()
        }

    def response(self, path: str, *, root_path: str) -> Response:
        """Returns the file at `path`, which is empty if the URL ends with the route prefix: then it redirects to the
        prefix with a slash, since the page's URLs are relative. Raises ApiError 404 if there is no such file."""
        file = self._files.get(path or "/")
        if file is None:
            raise ApiError(404, f"{path or '/'} is not served here", code="not_found")
        if not path:
            return Response(status_code=307, headers=HEADERS | {"location": f"{root_path}/"})
        media_type, body = file
        return Response(body, headers=HEADERS | {"content-type": media_type})
