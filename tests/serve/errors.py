"""What an error looks like to a client of OpenAI's API."""

from __future__ import annotations

from typing import Any

import httpx


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The `error` of an answer; AssertionError unless it has this status and OpenAI's shape."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:1000]}"
    assert response.headers["content-type"].startswith("application/json"), response.headers
    body = response.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error), error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for leak in ("Traceback", "/home/", "/tmp/", "site-packages", "0x7f", "<_io.", "RayTaskError"):
        assert leak not in response.text, response.text
    return dict(error)
