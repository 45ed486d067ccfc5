"""A web server on this machine, for what the application fetches: each path behaves in a way of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.programs import free_port
from tests.threaded import serving


class LoopbackServer:
    """Serves `file` under /image; see `_Handler.do_GET` for the rest."""

    def __init__(self, file: bytes, large: bytes) -> None:
        self.file = file
        self.large = large
        self.paths: list[str] = []
        """What was asked for, in order."""
        self.closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", free_port()), _Handler)
        self._http.owner = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def serving(self) -> Iterator[LoopbackServer]:
        with serving(self._http):
            try:
                yield self
            finally:
                self.closing.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: LoopbackServer = self.server.owner  # type: ignore[attr-defined]
        server.paths.append(self.path)
        action, _, argument = self.path.removeprefix("/").partition("/")
        match action:
            case "image":
                self._answer(200, server.file)
            case "large":
                self._answer(200, server.large)
            case "endless":  # does not say how much will come
                self._answer(200, server.large, length=False)
            case "status":
                self._answer(int(argument), server.file)
            case "redirect":  # as often as the number says, then to the image
                count = int(argument)
                self._answer(302, b"", location=f"/redirect/{count - 1}" if count > 1 else "/image")
            case "to":
                self._answer(302, b"", location=argument)
            case "slow":  # neither answers nor hangs up
                server.closing.wait(30)
                self.close_connection = True
            case _:
                self._answer(200, b"this is no image")

    def _answer(self, status: int, body: bytes, *, location: str | None = None, length: bool = True) -> None:
        self.send_response(status)
        if location is not None:
            self.send_header("location", location)
        if length:
            self.send_header("content-length", str(len(body)))
        else:
            self.close_connection = True
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the application leaves when it has seen enough
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quietly."""
