"""Client that sends a question with pictures to a server with OpenAI's chat route, and streams the answer."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from deployments.ingress.auth.bind_address import is_loopback

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 620.0
"""Limit between two pieces of an answer: slightly above the server's limit for the whole, which is hit first."""

_ROUTE = "/chat/completions"
_FURTHER_TYPES = {
    ".3gp": "video/3gpp",
    ".flac": "audio/flac",
    ".m4a": "audio/mp4",
    ".m4v": "video/mp4",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".mkv": "video/x-matroska",
    ".webp": "image/webp",
}
_REMEDIES = {
    401: "give a key with --key or in VITRAY_API_KEY; whoever runs the server makes one with `vitray new-key NAME`",
    404: "--url is the server's address, such as http://127.0.0.1:8000; without --model, the server's own is asked",
    413: "send a smaller picture, or let whoever runs the server raise the limit",
    429: "retry in a few seconds",
    503: "retry in a few seconds",
}


class AskError(Exception):
    """The question got no complete answer."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(f"{message}\n{remedy[0].upper()}{remedy[1:]}." if remedy else message)


@dataclass
class Answer:
    """An answer's text and metadata; the metadata is filled in while the text is read."""

    server_timing: tuple[tuple[str, str], ...] = ()
    """Metrics of the Server-Timing header in its order, with their milliseconds or descriptions."""
    finish_reason: str | None = None
    pieces: Iterator[str] = field(default_factory=lambda: iter(()))
    """The text as it arrives. Raises AskError if the answer is cut off."""


@cache
def _file_types() -> mimetypes.MimeTypes:
    """Returns Python's built-in types and those that it lacks; the system's table differs between machines."""
    types = mimetypes.MimeTypes()
    for suffix, name in _FURTHER_TYPES.items():
        types.add_type(name, suffix)
    return types


def picture_url(picture: str) -> str:
    """Returns a `data:` URL for a file, and an http(s) URL unchanged. Raises AskError for an unreadable file."""
    if picture.startswith(("http://", "https://")):
        return picture
    try:
        encoded = base64.b64encode(Path(picture).read_bytes()).decode()
    except OSError as error:
        raise AskError(f"{picture}: {error.strerror}") from error
    return f"data:{_file_types().guess_type(picture)[0] or 'image/png'};base64,{encoded}"


def medium(url: str) -> str:
    """Returns "image", "audio" or "video", by the type in a `data:` URL or by the name in an http(s) URL."""
    guessed = url[len("data:") :] if url.startswith("data:") else _file_types().guess_type(urlsplit(url).path)[0] or ""
    kind = guessed.partition("/")[0]
    return kind if kind in ("audio", "video") else "image"


def chat_body(
    question: str, picture_urls: Iterable[str], *, model: str, detail: str | None, max_tokens: int | None
) -> dict[str, object]:
    """Returns the request body: the pictures in order, then the question."""
    content: list[dict[str, object]] = []
    for url in picture_urls:
        kind = f"{medium(url)}_url"
        item = {"url": url} if detail is None or kind != "image_url" else {"url": url, "detail": detail}
        content.append({"type": kind, kind: item})
    content.append({"type": "text", "text": question})
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": content}], "stream": True}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


class ChatClient:
    """HTTP connections to one server; a context manager."""

    def __init__(self, url: str, key: str | None) -> None:
        """`url`: with or without a final `/v1`. Raises AskError if it is not a URL of a server."""
        key = (key or "").strip()
        if not key.isascii() or any(map(str.isspace, key)):
            raise AskError("the API key contains spaces, line breaks or characters outside ASCII", _REMEDIES[401])
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        try:
            parsed = httpx.URL(self.base)
        except httpx.InvalidURL as error:
            raise AskError(f"--url {url}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise AskError(f"--url {url} is not the address of a server", "write it as http://127.0.0.1:8000")
        try:
            self._http = httpx.Client(
                headers={b"authorization": f"Bearer {key}".encode()} if key else None,
                timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                trust_env=not is_loopback(parsed.host),  # a proxy cannot reach servers on this machine
            )
        except (ImportError, OSError, ValueError) as error:  # of a proxy or certificates that the environment names
            raise AskError(f"the client for {url} cannot be made: {error}") from error

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Returns the first model that the server lists. Raises AskError."""
        try:
            return str(self._json(f"{self.base}/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise AskError(f"{self.base}/models does not list a model", _REMEDIES[404]) from error

    def cluster(self) -> dict[str, Any]:
        """Returns the server's `GET /cluster`. Raises AskError."""
        return self._json(f"{self.base.removesuffix('/v1')}/cluster")

    def _json(self, address: str) -> dict[str, Any]:
        with self._explained():
            response = self._http.get(address)
        _raise_for_status(response)
        try:
            return dict(response.json())
        except (ValueError, TypeError) as error:
            raise AskError(f"{address} does not answer with a JSON object", _REMEDIES[404]) from error

    @contextmanager
    def ask(self, body: dict[str, object]) -> Iterator[Answer]:
        """Sends the request. The head of the response has arrived when this returns; the pieces are read on demand.

        Raises AskError, also while pieces are read.
        """
        with self._explained(), self._http.stream("POST", self.base + _ROUTE, json=body) as response:
            if not response.is_success:
                response.read()
                _raise_for_status(response)
            answer = Answer(_server_timing(response.headers.get_list("server-timing")))
            answer.pieces = _pieces(response, answer)
            yield answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            start = "start one with `vitray serve`, or name another address with --url"
            raise AskError(f"no server answers at {self.base}: {error}", start) from error
        except httpx.TimeoutException as error:
            raise AskError(f"received nothing from {self.base} for {ANSWER_TIMEOUT_S:g} s", _REMEDIES[503]) from error
        except (httpx.RequestError, UnicodeError) as error:  # a host that is no name
            raise AskError(f"the connection to {self.base} broke: {error}", _REMEDIES[503]) from error


def _pieces(response: httpx.Response, answer: Answer) -> Iterator[str]:
    events = event_data(response.iter_bytes())
    for data in events:
        if data == "[DONE]":
            break
        yield from _texts(data, answer)
    else:
        raise AskError("the answer is incomplete: the connection ended early")
    with suppress(httpx.RequestError):  # the answer is complete
        for _ in events:  # to the end, since a server counts a client that leaves before
            pass


def _texts(data: str, answer: Answer) -> Iterator[str]:
    """Yields the non-empty text of the first choice in one JSON object. Raises AskError for an error object."""
    try:
        found = json.loads(data)
        if "error" in found:
            raise AskError(_message(found) or "the server failed")
        for choice in found["choices"][:1]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := choice["delta"].get("content"):
                yield str(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AskError(f"the server's answer is not one of OpenAI's chat route: {data[:200]}") from error


def event_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yields the `data` of each server-sent event as soon as its last byte has arrived.

    Only LF and CRLF end a line: the text may contain U+2028 and others at which Python would split.
    """
    lines: list[bytes] = []
    rest = b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in (ended.removesuffix(b"\r") for ended in complete):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines).decode("utf-8", "replace")
                lines.clear()


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    status = response.status_code
    if response.has_redirect_location:
        raise AskError(f"the server redirects to {response.headers['location']}", "use that address as --url")
    try:
        message = _message(response.json())
    except ValueError:
        message = None
    told = message or f"{response.request.url} answered {status} {response.reason_phrase}"
    remedy = _REMEDIES.get(status)
    if seconds := response.headers.get("retry-after"):
        remedy = f"ask again in {seconds} s"
    raise AskError(told, remedy)


def _message(body: object) -> str | None:
    """Returns the message of OpenAI's error body, or of the other error bodies that servers send."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message) if message else None


def _server_timing(headers: list[str]) -> tuple[tuple[str, str], ...]:
    """Parses `fetch;dur=1.5, cache;desc="0/1"` into (("fetch", "1.5 ms"), ("cache", "0/1"))."""
    found = re.findall(r'([\w-]+);(?:dur=([\d.]+)|desc="([^"]*)")', ", ".join(headers))
    return tuple((name, f"{dur:>8} ms" if dur else description) for name, dur, description in found)
