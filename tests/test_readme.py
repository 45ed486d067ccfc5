"""Commands, snippets and names in README.md and docs/ are valid: snippets run against a stand-in server or are accepted
by the configuration check, and every target, path, option, extra and setting that the pages name exists.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import ray.scripts.scripts
import ray.serve.scripts
import yaml
from click.shell_completion import BashComplete
from click.testing import CliRunner
from PIL import Image

from benchmarks import bench_serve
from configs import reference
from deployments.cli import bench, config_check
from deployments.cli import main as cli
from deployments.common import names
from deployments.common.messages import NOT_STORED, EncodeTimings, SharedEmbedding
from deployments.ingress.http import chat_request, image_parts, request_body
from deployments.telemetry.server_timing import format_server_timing
from scripts import readme, setup
from tests.programs import output_of
from tests.threaded import serving

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
INSTALL, REQUESTS = ROOT / "docs" / "install.md", ROOT / "docs" / "requests.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS: dict[str, click.Command] = {
    "vitray": cli.main,
    "serve": ray.serve.scripts.cli,
    "ray": ray.scripts.scripts.cli,
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = [
        Block(page.name, language, text)
        for page in PAGES
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    return [block for block in found if block.language in languages]


def code_spans() -> list[str]:
    """What stands between single backticks, outside of fenced blocks and generated tables."""
    spans = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        spans += re.findall(r"`([^`\n]+)`", re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL))
    return spans


def shell_commands() -> list[list[str]]:
    """Every command line that a reader may type, as words, without assignments before it."""
    lines = [line for block in blocks("sh") for line in block.text.replace("\\\n", " ").splitlines()]
    lines += [
        line.removeprefix("$ ") for block in blocks("console") for line in block.text.splitlines() if line[:1] == "$"
    ]
    lines += [span for span in code_spans() if " " in span]
    commands = []
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a here-document, or prose
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            commands.append(words)
    return commands


def named(program: str) -> list[list[str]]:
    """The commands of one program, those inside of a container among them."""
    commands = shell_commands()
    inside = [words[words.index(program) :] for words in commands if words[0] == "docker" and program in words[1:]]
    return [words for words in commands if words[0] == program] + inside


def test_tables_are_those_that_the_code_makes() -> None:
    for page, made in readme.tables().items():
        assert page.read_text() == readme.with_tables(page.read_text(), made), "run python scripts/readme.py"


def test_tables_need_their_marks() -> None:
    with pytest.raises(ValueError, match="results"):
        readme.with_tables("no marks", {"results": "| |"})


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_paths_are_there() -> None:
    """Links are checked in test_docs.py."""
    paths = [word for span in code_spans() for word in span.split() if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)+\.\w+", word)]
    assert len(paths) >= 3
    for path in paths:
        assert (ROOT / path).is_file(), path


def test_picture_is_well_formed() -> None:
    assert ElementTree.parse(ROOT / "docs" / "request.svg").getroot().tag.endswith("svg")


def test_the_pages_screenshots_are_there_and_small() -> None:
    shown = re.findall(r'(?:src|srcset)="(docs/[^"]+)"', README.read_text())
    assert sorted(shown) == ["docs/page-dark.png", "docs/page-light.png"]
    for name in shown:
        assert (ROOT / name).stat().st_size < 300_000
        with Image.open(ROOT / name) as image:
            assert image.format == "PNG"


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [words[1] for words in named("make")]
    assert {"demo", "test", "setup", "serve", "check", "help"} <= set(asked) <= targets


@pytest.mark.parametrize("program", COMMANDS)
def test_options_of_our_and_rays_commands_are_there(program: str) -> None:
    asked = named(program)
    assert asked
    for words in asked:
        command: click.Command = COMMANDS[program]
        arguments = iter(words[1:])
        while isinstance(command, click.Group) and (name := next(arguments, None)):
            command = command.commands[name]
        if command is bench.serve:  # its options are those of the program
            command = bench_serve.main
        options = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
        for word in arguments:
            assert not word.startswith("-") or word.split("=")[0] in {*options, "--help"}, f"{words}: {word}"


def test_extras_and_pins_are_those_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    for words in shell_commands():
        for word in words:
            for extra in re.findall(r"^\.?\[([a-z0-9,-]+)\]$|^EXTRAS=(\S+)$", word):
                assert set(",".join(extra).strip(",").split(",")) <= set(extras), words
    wheels = [words for words in named("pip") if "--index-url" in words]
    assert wheels == [
        ["pip", "install", "--no-deps", "--index-url", setup.CPU_TORCH_INDEX, setup.cpu_torch(ROOT / "pyproject.toml")]
    ]
    tested_with = next(line for line in INSTALL.read_text().splitlines() if line.startswith("| x86-64"))
    named_there = [one for one in extras["cpu"] if "==" in one and ";" not in one]  # others complete the lock
    assert len(named_there) == 2
    for requirement in named_there:
        assert requirement.split("==")[1] in tested_with


def test_targets_of_the_image_are_there() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    asked = {words[words.index("--target") + 1] for words in named("docker") if "build" in words}
    assert asked
    assert asked <= stages


def yaml_blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    for block in blocks("yaml"):
        yield block.page, yaml.safe_load(block.text)


def test_yaml_snippets_would_be_accepted() -> None:
    seen = set()
    for page, content in yaml_blocks():
        kind = content.get("kind") or next(key for key in ("applications", "deployments", "args") if key in content)
        seen.add(kind)
        if kind == "applications":
            assert config_check.problems(content) == [], page
        elif kind == "deployments":
            application = {"import_path": names.IMPORT_PATH, **content}
            shipped = {"http_options": {"host": "127.0.0.1"}, "applications": [application]}
            assert config_check.problems(shipped) == [], page
        else:
            assert config_check.args_problems(content["args"], page) == []
    assert seen == {"applications", "deployments", "args"}


def test_shipped_configuration_has_no_mistakes() -> None:
    assert config_check.problems(config_check.read_config(ROOT / "serve_config.yaml")) == []


def test_named_settings_are_there() -> None:
    keys = {setting.key for setting in reference.settings()}
    groups = "|".join({key.split(".")[0] for key in keys if "." in key})
    asked = [
        span for span in code_spans() if re.fullmatch(rf"({groups})(\.[a-z_]+)+", span) and "checkpoint" not in span
    ]
    assert {"ingress.fetch.http", "ingress.low_detail_max_pixels"} <= set(asked) <= keys


def test_server_timing_table_has_the_names_that_are_sent() -> None:
    image = SharedEmbedding("d" * 64, "float32", (4, 2), EncodeTimings(1.0, 1.0, 1.0, 1.0, cached=False), NOT_STORED)
    sent = [
        "fetch",
        "admission",
        *re.findall(r"(?:^|, )([\w-]+);", format_server_timing([image], 1.0, 1.0, "way")),
    ]
    table = REQUESTS.read_text().partition("| metric | meaning |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE) == [name.replace("image-1", "image-N") for name in sent]


def test_the_demos_table_is_the_one_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo = importlib.import_module("demo")
    assert demo.header() in README.read_text()


def python_block(having: str) -> Block:
    (found,) = [block for block in blocks("python") if having in block.text]
    return found


def test_library_snippet_prints_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(python_block("from encoder import").text, REQUESTS.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed in [block.text for block in blocks("console")]


class StandIn(HTTPServer):
    """Answers as the server would, and keeps what it was asked."""

    bodies: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": "small", "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if body.get("stream"):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "small"}
            chunk["choices"] = [{"index": 0, "delta": {"content": "seen"}}]
            self._send("text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
        else:
            self._send("application/json", '{"choices": [{"message": {"content": "seen"}}]}')

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    Image.new("RGB", (64, 48), "red").save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    standing_in = StandIn(("127.0.0.1", 0), Handler)
    standing_in.bodies = []
    with serving(standing_in):
        yield standing_in


def address(server: StandIn) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def assert_ingress_takes(body: dict[str, Any]) -> None:
    """One picture that is a whole file, and nothing that the ingress refuses."""
    (part,) = image_parts.image_parts(body)
    header, _, encoded = part.url.partition(",")
    assert header == "data:image/png;base64"
    assert encoded.startswith("iVBORw0KGgo")
    request_body.refuse_fields(body)
    chat_request.pop_pixel_bounds(body)


def test_client_snippet_asks_what_the_ingress_takes(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    source = python_block("from openai import").text.replace("http://127.0.0.1:8000", address(server))
    exec(compile(source, REQUESTS.name, "exec"), {})
    assert capsys.readouterr().out == "seen"
    (body,) = server.bodies
    assert_ingress_takes(body)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed on this machine")
def test_curl_snippet_and_script_ask_what_the_ingress_takes(server: StandIn) -> None:
    (snippet,) = [block.text for block in blocks("sh") if block.text.startswith("curl ")]
    for command in (
        ["sh", "-euc", snippet.replace("http://127.0.0.1:8000", address(server))],
        ["sh", str(ROOT / "examples" / "ask.sh"), "picture.png", "What is in the picture?", address(server)],
    ):
        assert "seen" in output_of(command, folder=Path.cwd())
        assert_ingress_takes(server.bodies.pop())


@pytest.mark.parametrize("name", ["ask_openai", "ask_langchain"])
def test_example_program_asks_what_the_ingress_takes(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    program = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "What?", "picture.png", "--url", f"{address(server)}/v1"])
    program.main()
    assert capsys.readouterr().out == "seen\n"
    assert_ingress_takes(server.bodies.pop())


def test_the_command_asks_what_the_ingress_takes(server: StandIn) -> None:
    words = next(words for words in named("vitray") if words[1:2] == ["ask"] and "picture.png" in words)
    result = CliRunner().invoke(cli.main, [*words[1:], "--url", address(server)])
    assert (result.exit_code, result.output) == (0, "seen\n")
    assert_ingress_takes(server.bodies.pop())


def test_completion_is_switched_on_as_written() -> None:
    """click's own, by the variable that it makes of the command's name."""
    (line,) = [block.text.strip() for block in blocks("sh") if block.text.startswith("eval ")]
    assert line == 'eval "$(_VITRAY_COMPLETE=bash_source vitray)"'
    assert line in (cli.main.help or "")
    completing = BashComplete(cli.main, {}, "vitray", "_VITRAY_COMPLETE")
    assert "_VITRAY_COMPLETE=bash_complete" in completing.source_template % completing.source_vars()
    assert [item.value for item in completing.get_completions([], "pl")] == ["plan"]
    assert "--timing" in [item.value for item in completing.get_completions(["ask"], "--t")]
