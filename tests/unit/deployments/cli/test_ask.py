"""`vitray ask` against a small HTTP server that answers in pieces, refuses, breaks off or is not there."""

from __future__ import annotations

import json
import mimetypes
import os
import pty
import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from deployments.cli import main as cli
from deployments.cli.ask import timing_lines
from deployments.cli.chat_client import Answer, AskError, ChatClient, chat_body, event_data, medium, picture_url
from tests.threaded import serving

ROOT = Path(__file__).parents[4]
TIMING = 'preprocess;dur=20.1, encode;dur=74.2, cache;desc="1/2"'
WAIT_S = 60


def event(text: str | None, **choice: object) -> bytes:
    """One chunk of a streamed answer."""
    delta = {} if text is None else {"content": text}
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    """Answers the chat route by `answer`, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.models: tuple[int, object] = (200, {"data": [{"id": "small"}, {"id": "other"}]})
        self.answer: Callable[[Handler], None] = lambda handler: handler.pieces(event("seen"), DONE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.json(*self.server.models)

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((body, self.headers.get("authorization")))
        self.server.answer(self)

    def json(self, status: int, body: object, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def pieces(self, *pieces: bytes, whole: bool = True) -> None:
        """An event stream in chunks; not `whole`, the connection ends without the last one."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("server-timing", TIMING)
        self.send_header("server-timing", "fetch;dur=0.5")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.piece(piece)
        if whole:
            self.piece(b"")
        self.close_connection = True

    def piece(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server):
        yield server


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


def ask(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["ask", "--url", server.url, *arguments])


def test_pictures_go_before_the_question_in_their_order(server: Server, picture: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "second.jpg")
    second, third = str(tmp_path / "second.jpg"), "https://example.org/third.png"
    result = ask(server, "Which?", picture, second, third, "--detail", "low", "--max-tokens", "7", "--key", "k-1 ")
    assert (result.exit_code, result.stdout) == (0, "seen\n")
    ((body, authorization),) = server.asked
    assert authorization == "Bearer k-1"
    assert (body["model"], body["stream"], body["max_tokens"]) == ("small", True, 7)
    (message,) = body["messages"]
    *images, text = message["content"]
    assert text == {"type": "text", "text": "Which?"}
    assert [image["image_url"] for image in images] == [
        {"url": f"data:image/png;base64,{b64encode(Path(picture).read_bytes()).decode()}", "detail": "low"},
        {"url": f"data:image/jpeg;base64,{b64encode(Path(second).read_bytes()).decode()}", "detail": "low"},
        {"url": third, "detail": "low"},
    ]


def test_without_options_nothing_is_sent_but_the_question(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(server, "Why?").exit_code == 0
    content = [{"type": "text", "text": "Why?"}]
    sent = {"model": "small", "messages": [{"role": "user", "content": content}], "stream": True}
    assert server.asked.pop() == (sent, None)
    monkeypatch.setenv("VITRAY_API_KEY", "from-environment")
    result = CliRunner().invoke(cli.main, ["ask", "Why?", "--url", f"{server.url}/v1/", "--model", "other"])
    assert result.exit_code == 0
    assert server.asked.pop() == ({**sent, "model": "other"}, "Bearer from-environment")


def test_pieces_are_printed_as_they_arrive(server: Server) -> None:
    """The server holds the second piece back until the first has been read from the command's stdout."""
    printed = threading.Event()

    def answer(handler: Handler) -> None:
        handler.pieces(event("one"), whole=False)
        if printed.wait(WAIT_S):
            handler.piece(event(" two"))
        handler.piece(DONE)
        handler.piece(b"")

    server.answer = answer
    command = [sys.executable, "-m", "deployments.cli.main", "ask", "--url", server.url, "Count"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 3) == b"one"
        printed.set()
        assert process.stdout.read() == b" two\n"
        assert process.wait(WAIT_S) == 0


def test_pieces_may_be_cut_anywhere(server: Server) -> None:
    """Within a character too; and a text may hold what Python takes for the end of a line."""
    text = "Ein Bild\u2028mit\x85Größe 🟥"
    stream = event("") + b": a comment\r\n\r\n" + event(text).replace(b"\n", b"\r\n") + event(None) + DONE
    server.answer = lambda handler: handler.pieces(*(stream[i : i + 1] for i in range(len(stream))))
    result = ask(server, "Was?")
    assert (result.exit_code, result.stdout) == (0, f"{text}\n")


def test_event_data_joins_lines_and_drops_what_is_not_complete() -> None:
    assert list(event_data([b"data: a\nda", b"ta:b\nid: 1\n\n\ndata: c\n"])) == ["a\nb"]


def test_timing_tells_what_the_server_and_the_client_measured(server: Server) -> None:
    result = ask(server, "Why?", "--timing")
    assert result.stdout == "seen\n"
    rows = [line.split() for line in result.stderr.splitlines()]
    assert rows[:4] == [
        ["preprocess", "20.1", "ms"],
        ["encode", "74.2", "ms"],
        ["cache", "1/2"],
        ["fetch", "0.5", "ms"],
    ]
    assert "first text (client)" in result.stderr
    assert "total (client)" in result.stderr
    assert "first text" not in timing_lines(Answer(), None, 1.0)


@pytest.mark.parametrize(
    ("status", "body", "headers", "told"),
    [
        (401, {"error": {"message": "no valid API key"}}, {}, ["no valid API key\n", "--key", "VITRAY_API_KEY"]),
        (400, {"error": {"message": "image 1: truncated"}}, {}, ["Error: image 1: truncated\n"]),
        (503, {"error": {"message": "too busy"}}, {"retry_after": "2"}, ["too busy\nAsk again in 2 s."]),
        (429, {"error": {"message": "over the quota"}}, {}, ["over the quota\nRetry in a few seconds"]),
        (404, {"detail": "Not Found"}, {}, ["Not Found\n", "--url"]),
        (502, b"<html>bad gateway", {}, ["/v1/chat/completions answered 502 Bad Gateway"]),
        (500, {}, {}, ["answered 500 Internal Server Error"]),
        (307, b"", {"location": "http://elsewhere"}, ["http://elsewhere", "Use that address as --url"]),
    ],
)
def test_a_refusal_is_shown_with_what_to_do(
    server: Server, status: int, body: object, headers: dict[str, str], told: list[str]
) -> None:
    server.answer = lambda handler: handler.json(status, body, **headers)
    result = ask(server, "Why?")
    assert (result.exit_code, result.stdout) == (1, "")
    for part in told:
        assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_a_refusal_before_the_question_sends_no_picture(server: Server, picture: str) -> None:
    server.models = (401, {"error": {"message": "no valid API key"}})
    result = ask(server, "Why?", picture)
    assert result.exit_code == 1
    assert "--key" in result.stderr
    assert server.asked == []
    server.models = (200, {"data": []})
    assert "does not list a model" in ask(server, "Why?", picture).stderr


def test_an_error_within_the_stream_ends_it(server: Server) -> None:
    error = b'data: {"error": {"message": "the language model died", "code": 500}}\n\n'
    server.answer = lambda handler: handler.pieces(event("half an"), error, DONE)
    result = ask(server, "Why?")
    assert (result.exit_code, result.stdout) == (1, "half an\n")
    assert result.stderr == "Error: the language model died\n"


@pytest.mark.parametrize("whole", [True, False], ids=["ended", "cut"])
def test_an_answer_that_breaks_off_is_no_success(server: Server, whole: bool) -> None:
    """What came is shown; a stream without its last event is told from a complete one."""
    server.answer = lambda handler: handler.pieces(event("half an"), whole=whole)
    result = ask(server, "Why?")
    assert (result.exit_code, result.stdout) == (1, "half an\n")
    assert "incomplete" in result.stderr


@pytest.mark.parametrize("data", [b"data: {}\n\n", b"data: 3\n\n", b"data: <html>\n\n"])
def test_what_is_no_chat_answer_is_told(server: Server, data: bytes) -> None:
    server.answer = lambda handler: handler.pieces(data, DONE)
    result = ask(server, "Why?")
    assert result.exit_code == 1
    assert "not one of OpenAI's chat route" in result.stderr


def test_an_answer_cut_at_its_longest_is_told(server: Server) -> None:
    server.answer = lambda handler: handler.pieces(event("a"), event(None, finish_reason="length"), DONE)
    result = ask(server, "Why?", "--max-tokens", "1")
    assert result.exit_code == 0
    assert "raise --max-tokens" in result.stderr


def test_the_response_is_read_to_its_end(server: Server) -> None:
    """Serve logs status 499 for a client that closes after `[DONE]` but before the last chunk."""
    stayed: list[bool] = []

    def answer(handler: Handler) -> None:
        handler.pieces(event("a"), DONE, whole=False)
        handler.connection.settimeout(0.5)
        try:
            stayed.append(handler.connection.recv(1) != b"")
        except TimeoutError:
            stayed.append(True)
        handler.piece(b"")

    server.answer = answer
    assert (ask(server, "Why?").stdout, stayed) == ("a\n", [True])


def test_a_connection_that_breaks_after_the_last_event_is_no_error(server: Server) -> None:
    server.answer = lambda handler: handler.pieces(event("a"), DONE, whole=False)
    result = ask(server, "Why?")
    assert (result.exit_code, result.stdout) == (0, "a\n")


@pytest.mark.parametrize("key", ["a\nb", "a b", "schlüssel"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(server: Server, key: str) -> None:
    result = ask(server, "Which?", "--key", key)
    assert (result.exit_code, key in result.stderr) == (1, False)
    assert "the API key contains" in result.stderr


def test_no_server_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not asked for this machine's own servers."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = CliRunner().invoke(cli.main, ["ask", "Why?", "--url", f"http://127.0.0.1:{free.getsockname()[1]}"])
    assert result.exit_code == 1
    assert "refused" in result.stderr
    assert "`vitray serve`" in result.stderr


def test_a_server_that_cannot_be_reached_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.cli.chat_client.CONNECT_TIMEOUT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        result = CliRunner().invoke(cli.main, ["ask", "Why?", "--url", f"http://127.0.0.1:{full.getsockname()[1]}"])
    assert result.exit_code == 1
    assert "timed out" in result.stderr
    assert "name another address with --url" in result.stderr


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(AskError, match="--url"):
        ChatClient(url, None)


def test_a_host_that_is_no_name_is_told() -> None:
    result = CliRunner().invoke(cli.main, ["ask", "Why?", "--url", "http://a..b"])
    assert (result.exit_code, "the connection to http://a..b/v1 broke" in result.stderr) == (1, True), result.stderr


@pytest.mark.parametrize(("name", "value"), [("ALL_PROXY", "socks5://127.0.0.1:1080"), ("SSL_CERT_FILE", "/nowhere")])
def test_a_proxy_or_certificates_that_cannot_be_used_are_told(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(AskError, match=r"the client for http://example\.com cannot be made: "):
        ChatClient("http://example.com", None)


def test_a_missing_picture_is_a_mistake_of_the_command_line(server: Server, picture: str, tmp_path: Path) -> None:
    result = ask(server, "Why?", picture, str(tmp_path / "none.png"))
    assert result.exit_code == 2
    assert "none.png" in result.stderr
    assert "picture.png" not in result.stderr
    assert server.asked == []
    with pytest.raises(AskError, match="Is a directory"):
        picture_url(str(tmp_path))


def test_a_question_in_another_encoding_is_a_mistake_of_the_command_line(server: Server) -> None:
    """Python passes bytes that are not UTF-8 on as surrogates."""
    result = ask(server, "caf\udce9?")
    assert result.exit_code == 2
    assert "the question has bytes that are not UTF-8" in result.stderr
    assert server.asked == []


def test_a_server_cannot_send_commands_to_the_terminal(server: Server) -> None:
    server.answer = lambda handler: handler.json(400, {"error": {"message": "\x1b[2Jcleared"}})
    assert ask(server, "Why?").stderr == "Error: [2Jcleared\n"
    server.answer = lambda handler: handler.pieces(event("a\x1b[2Jb"), DONE)
    assert ask(server, "Why?").stdout == "a\x1b[2Jb\n"  # a file gets what the model said
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "deployments.cli.main", "ask", "--url", server.url, "Why?"]
    done = subprocess.run(command, cwd=ROOT, stdout=terminal, timeout=WAIT_S, check=False)
    os.close(terminal)
    assert (done.returncode, os.read(ours, 100)) == (0, b"a[2Jb\r\n")
    os.close(ours)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("data:image/png;base64,AAAA", "image"),
        ("data:audio/mpeg;base64,AAAA", "audio"),
        ("data:video/mp4;base64,AAAA", "video"),
        ("https://a.example/clip.mp4?x=1", "video"),
        ("https://a.example/speech.wav", "audio"),
        ("https://a.example/page", "image"),
        *((f"https://a.example/{name}", "audio") for name in ("a.flac", "a.ogg", "a.oga", "a.opus", "a.m4a", "a.mp3")),
        *((f"https://a.example/{name}", "video") for name in ("a.mkv", "a.webm", "a.mov", "a.m4v", "a.3gp")),
        *((f"https://a.example/{name}", "image") for name in ("a.webp", "a.PNG")),
    ],
)
def test_the_medium_of_a_url(url: str, kind: str) -> None:
    """Where the system has no table of types, as in a small container, Python's own lacks many of them."""
    assert medium(url) == kind


def test_types_of_files_are_not_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mimetypes, "guess_type", lambda *_: ("text/plain", None))
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    assert picture_url(str(tmp_path / "a.flac")).startswith("data:audio/flac;base64,")


def test_sounds_and_videos_are_parts_of_their_own_without_detail() -> None:
    body = chat_body("?", ["data:audio/wav;base64,A", "data:video/mp4;base64,A"], model="m", detail="low", max_tokens=1)
    [message] = cast(list[dict[str, Any]], body["messages"])
    assert [part["type"] for part in message["content"]] == ["audio_url", "video_url", "text"]
    assert message["content"][0]["audio_url"] == {"url": "data:audio/wav;base64,A"}
