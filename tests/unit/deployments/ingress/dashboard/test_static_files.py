"""The page's files: what they are sent with, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from deployments.common.api_error import ApiError
from deployments.ingress.auth.gate import PATHS_WITHOUT_KEY
from deployments.ingress.dashboard.static_files import MEDIA_TYPES, POLICY, Page
from deployments.ingress.http.routes import PAGE_FILES, Service, open_route

FOLDER = resources.files("deployments.ingress.dashboard") / "page"


def directives() -> dict[str, list[str]]:
    return {name: sources for name, *sources in (directive.split() for directive in POLICY.split("; "))}


@pytest.mark.parametrize("path", PAGE_FILES)
def test_every_file_is_sent_with_the_policy(path: str) -> None:
    response = Page(enabled=True).response(path, root_path="")
    assert response.status_code == 200
    assert response.body == (FOLDER / PAGE_FILES[path]).read_bytes()
    assert response.headers["content-type"] == MEDIA_TYPES[PAGE_FILES[path].rpartition(".")[2]]
    assert response.headers["content-security-policy"] == POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert open_route("GET", path, management=False).service is Service.PAGE
    assert path in PATHS_WITHOUT_KEY


def test_every_file_of_the_folder_is_served() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(PAGE_FILES.values())


def test_the_policy_lets_in_this_server_alone() -> None:
    allowed = directives()
    assert allowed["default-src"] == ["'none'"]
    assert allowed["frame-ancestors"] == allowed["base-uri"] == allowed["form-action"] == ["'none'"]
    assert {source for sources in allowed.values() for source in sources} == {"'none'", "'self'", "blob:", "'script'"}
    assert allowed["script-src"] == allowed["style-src"] == allowed["connect-src"] == ["'self'"]


@pytest.mark.parametrize("name", sorted(set(PAGE_FILES.values())))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text()
    addresses = [found for found in re.findall(r"[\w+.-]+://[^\"'\s)]*", text) if "www.w3.org/2000/svg" not in found]
    assert addresses == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc", text)
    assert "url(" not in text
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_the_page_is_small() -> None:
    assert sum(len(file.read_bytes()) for file in FOLDER.iterdir()) < 50_000


def test_the_bare_prefix_leads_to_the_page() -> None:
    response = Page(enabled=True).response("", root_path="/app")
    assert response.status_code == 307
    assert response.headers["location"] == "/app/"
    assert response.body == b""


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../door.py", "/page/index.html", "//"])
def test_other_files_are_not_there(path: str) -> None:
    with pytest.raises(ApiError, match="is not served here") as refused:
        Page(enabled=True).response(path, root_path="")
    assert refused.value.status == 404


def test_a_page_that_is_switched_off() -> None:
    for path in ("", *PAGE_FILES):
        with pytest.raises(ApiError, match="is not served here"):
            Page(enabled=False).response(path, root_path="/app")
