"""API errors in the shape of OpenAI's and Anthropic's error bodies, each with its HTTP status."""

from __future__ import annotations

import json
from enum import Enum

from deployments.common.messages import ResponseHead

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "overloaded_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 504: "timeout_error"}
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Routes whose errors have Anthropic's format."""
RESPONSES_PATH = "/v1/responses"
MAX_MESSAGE_CHARACTERS = 1000
"""Longer messages are cut: a message may quote client input of megabytes."""


class ApiError(Exception):
    """An error whose message may be shown to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def conversation_field(path: str) -> str:
    """Returns the field of the bodies of a route that holds messages and images, for the `param` of errors."""
    return "input" if path == RESPONSES_PATH else "messages"


def error_head_and_body(error: ApiError) -> tuple[ResponseHead, bytes]:
    """Returns the HTTP response: OpenAI's error body, with `Retry-After` or `WWW-Authenticate` where they apply."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = error.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + " …"
    fields = {"message": message, "type": kind, "param": error.param, "code": error.code}
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return ResponseHead(error.status, headers), json.dumps({"error": fields}).encode()


def anthropic_error(status: int, body: bytes) -> bytes:
    """Returns an error body, in OpenAI's format or another, in Anthropic's format."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "the server failed to answer"
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": error}).encode()


def error_event(error: ApiError, path: str) -> bytes:
    """Returns the event that ends a stream of the route `path` with an error."""
    body = error_head_and_body(error)[1]
    if path in ANTHROPIC_PATHS:
        return b"event: error\ndata: " + anthropic_error(error.status, body) + b"\n\n"
    return b"data: " + body + b"\n\n"


class Shed(Enum):
    """Why a request was shed; the metric label `reason`."""

    REQUESTS = "requests_waiting"
    TOKENS = "tokens_waiting"
    DEADLINE = "deadline"
    CLIENT_GONE = "client_gone"
    RATE_LIMIT = "quota"
    BYTES = "bytes_held"
    REPLICA_QUEUE = "replica_queue"
    OBJECT_STORE = "object_store"


class OverloadedError(ApiError):
    """The admission queue is full."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(503, message, code="overloaded", retry_after_s=retry_after_s)
