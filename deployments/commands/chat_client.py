"""A question with pictures to any server with OpenAI's chat route, and its answer piece by piece.

It must not know of terminals: what goes wrong is an `AskError` with the sentence to show, and what to do about it.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import mimetypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 620.0
"""Between two pieces of an answer: a little over the server's own limit for the whole, so that it answers first."""

_ROUTE = "/chat/completions"
_REMEDIES = {
    401: "give a key with --key or in VITRAY_API_KEY; whoever runs the server makes one with `vitray new-key NAME`",
    404: "--url is the server's address, such as http://127.0.0.1:8000; without --model, the server's own is asked",
    413: "send a smaller picture, or let whoever runs the server raise the limit",
    429: "wait a little and ask again",
    503: "wait a little and ask again",
}


class AskError(Exception):
    """A question without a whole answer."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(f"{message}\n{remedy[0].upper()}{remedy[1:]}." if remedy else message)


@dataclass
class Answer:
    """What is known of an answer beside its text; filled while the text is read."""

    server_timing: tuple[tuple[str, str], ...] = ()
    """Metrics of the Server-Timing header with their milliseconds or their description, in its order."""
    finish_reason: str | None = None
    pieces: Iterator[str] = field(default_factory=lambda: iter(()))
    """The text as it arrives. Raises AskError where the answer breaks off."""


def picture_url(picture: str) -> str:
    """A `data:` URL for a file; an address stays what it is. Raises AskError for a file that cannot be read."""
    if picture.startswith(("http://", "https://")):
        return picture
    try:
        encoded = base64.b64encode(Path(picture).read_bytes()).decode()
    except OSError as error:
        raise AskError(f"{picture}: {error.strerror}") from error
    return f"data:{mimetypes.guess_type(picture)[0] or 'image/png'};base64,{encoded}"


def chat_body(
    question: str, picture_urls: Iterable[str], *, model: str, detail: str | None, max_tokens: int | None, stream: bool
) -> dict[str, object]:
    """The request: the pictures in order, then the question."""
    content: list[dict[str, object]] = []
    for url in picture_urls:
        image = {"url": url} if detail is None else {"url": url, "detail": detail}
        content.append({"type": "image_url", "image_url": image})
    content.append({"type": "text", "text": question})
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": content}], "stream": stream}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


class ChatClient:
    """Connections to one server. A context manager."""

    def __init__(self, url: str, key: str | None) -> None:
        """`url` with or without the `/v1` at its end. Raises AskError where it is no address."""
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        try:
            parsed = httpx.URL(self.base)
        except httpx.InvalidURL as error:
            raise AskError(f"--url {url}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise AskError(f"--url {url} is no address of a server", "write it as http://127.0.0.1:8000")
        self._http = httpx.Client(
            headers={b"authorization": f"Bearer {key.strip()}".encode()} if key else None,
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not _is_loopback(parsed.host),  # a proxy knows nothing of servers on this machine
        )

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The model that the server names first. Raises AskError."""
        with self._explained():
            response = self._http.get(f"{self.base}/models")
            _raise_for_status(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise AskError(f"{self.base}/models does not list a model", _REMEDIES[404]) from error

    @contextmanager
    def ask(self, body: dict[str, object]) -> Iterator[Answer]:
        """Sends the request; the answer's head is there when this returns, its pieces come as they are read.

        Raises AskError, also while pieces are read.
        """
        with self._explained(), self._http.stream("POST", self.base + _ROUTE, json=body) as response:
            if not response.is_success:
                response.read()
                _raise_for_status(response)
            answer = Answer(_server_timing(response.headers.get_list("server-timing")))
            streamed = response.headers.get("content-type", "").startswith("text/event-stream")
            answer.pieces = _streamed(response, answer) if streamed else _whole(response, answer)
            yield answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            start = "start one with `vitray serve`, or name another address with --url"
            raise AskError(f"no server answers at {self.base}: {error}", start) from error
        except httpx.ConnectTimeout as error:
            raise AskError(f"no server answers at {self.base} within {CONNECT_TIMEOUT_S:g} s", "check --url") from error
        except httpx.TimeoutException as error:
            raise AskError(f"nothing came from {self.base} for {ANSWER_TIMEOUT_S:g} s", _REMEDIES[503]) from error
        except httpx.RequestError as error:
            raise AskError(f"the connection to {self.base} broke: {error}", _REMEDIES[503]) from error


def _streamed(response: httpx.Response, answer: Answer) -> Iterator[str]:
    for data in event_data(response.iter_bytes()):
        if data == "[DONE]":
            return
        yield from _texts(data, answer, "delta")
    raise AskError("the answer broke off: the connection ended before the server said that it was complete")


def _whole(response: httpx.Response, answer: Answer) -> Iterator[str]:
    response.read()
    yield from _texts(response.text, answer, "message")


def _texts(data: str, answer: Answer, part: str) -> Iterator[str]:
    """The text of the first choice in one JSON object, "" left out. Raises AskError for an error in its place."""
    try:
        found = json.loads(data)
        if "error" in found:
            raise AskError(_message(found) or "the server failed")
        for choice in found["choices"][:1]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := choice[part].get("content"):
                yield str(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AskError(f"the server's answer is not one of OpenAI's chat route: {data[:200]}") from error


def event_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each server-sent event, as soon as its last byte is there.

    Lines end with LF or CRLF alone: the text within may hold U+2028 and others at which Python would split.
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
        raise AskError(f"the server sends elsewhere: {response.headers['location']}", "give that address as --url")
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
    """Of OpenAI's error body, or of what else servers put there."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(message) if message else None


def _server_timing(headers: list[str]) -> tuple[tuple[str, str], ...]:
    """`fetch;dur=1.5, cache;desc="0/1"` as (("fetch", "1.5"), ("cache", "0/1"))."""
    metrics = []
    for part in ", ".join(headers).split(","):
        name, _, parameters = part.strip().partition(";")
        value = parameters.partition("=")[2].strip().strip('"')
        if name:
            metrics.append((name.strip(), value))
    return tuple(metrics)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
