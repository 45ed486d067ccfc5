"""The walk of a request through the source: what is entered, in which order, and where it ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.count_path import ROOT, main, walked

MOST_FILES, MOST_RETURNS = 12, 6
INGRESS = """
from functools import partial

from deployments.body import Body, read
from deployments.door import Door


class Ingress:
    def __init__(self, llm):
        self._llm = llm
        self._door = Door()

    async def __call__(self, request, deadline):
        client: str = self._door.admit(request)
        if request.path == "/openapi.json":
            return self._openapi(request)
        body = read(request)
        try:
            return await self._answer(body, partial(self._sent, body), client)
        except ValueError:
            return self._openapi(request)

    async def _answer(self, body: Body, send, client):
        self._door.charge(client)
        return send(body.written())

    def _sent(self, body, written):
        return self._llm.options(client="x").remote(written)

    def _openapi(self, request):
        return request
"""
DOOR = """
class Door:
    def admit(self, request) -> str:
        return request.headers.get("authorization")

    def charge(self, client): ...
"""
BODY = """
import dataclasses
import json

from deployments import images


@dataclasses.dataclass
class Body:
    fields: dict
    images: list

    def written(self) -> bytes:
        return json.dumps(self.fields)


def read(request) -> Body:
    fields = json.loads(request.body())
    return Body(fields, images.found(fields))
"""
IMAGES = """
def found(fields):
    return [part for part in fields["messages"]]
"""
LLM = """
class LLM:
    async def handle(self, request, call):
        waiting(call)
        return await asked(self.app, request)


def waiting(call): ...


async def asked(app, request):
    await app(request.scope, None, None)
    late(request)


def late(request): ...
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    sources = {"ingress": INGRESS, "door": DOOR, "body": BODY, "images": IMAGES, "llm": LLM}
    (tmp_path / "deployments").mkdir()
    for name, source in sources.items():
        (tmp_path / "deployments" / f"{name}.py").write_text(source)
    return tmp_path


def test_the_walk_follows_the_request_and_what_holds_it(repo: Path) -> None:
    """Neither texts of it, nor other routes, error handlers and what comes after it was sent."""
    assert walked(repo) == [
        ("deployments/ingress.py", ["Ingress.__call__"]),
        ("deployments/door.py", ["Door.admit"]),
        ("deployments/body.py", ["read"]),
        ("deployments/images.py", ["found"]),
        ("deployments/ingress.py", ["Ingress._answer"]),
        ("deployments/body.py", ["Body.written"]),
        ("deployments/ingress.py", ["Ingress._sent"]),
        ("deployments/llm.py", ["LLM.handle", "asked"]),
    ]


def test_stays_beyond_the_first_are_returns(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repo", str(repo)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 files, 3 returns"


def test_a_request_that_is_never_sent_is_told(repo: Path) -> None:
    (repo / "deployments" / "llm.py").write_text(LLM.replace("await app(request.scope, None, None)", ""))
    with pytest.raises(ValueError, match=r"LLM\.handle: the walk ended before the request was sent"):
        walked(repo)


def test_this_repository_keeps_its_path_short() -> None:
    files = [path for path, _ in walked(ROOT)]
    assert len(set(files)) <= MOST_FILES
    assert len(files) - len(set(files)) <= MOST_RETURNS
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The path of a request through the code")[2]
    listed = re.findall(r"^\d+\. `([^`]+)`", page.partition("## Where to change")[0], re.MULTILINE)
    assert set(files) <= set(listed)
