"""What README, docs/ and the shipped files tell people to start is closed: Ray asks for a token, Serve's proxy has its
bounds, and no address but loopback is listened on without keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._common.utils import import_attr

from configs.schema import AppConfig
from deployments.http_proxy import limits as proxy_bounds
from deployments.ingress.auth.bind_address import bind_refusal

ROOT = Path(__file__).parent.parent
# A function of the operator's own, on its way to Serve's controller.
OWN_PICKLES = ("deployments/scaling/policies.py",)
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(*languages: str) -> list[str]:
    return [
        text
        for page in PAGES
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        if language in languages
    ]


def documents() -> list[dict[str, Any]]:
    found = [part for text in blocks("yaml") for part in yaml.safe_load_all(text) if isinstance(part, dict)]
    files = (ROOT / "serve_config.yaml", ROOT / "docs" / "rayservice.yaml")
    return [*found, *(yaml.safe_load(file.read_text()) for file in files)]


def test_every_cluster_that_is_documented_asks_for_a_token() -> None:
    starts = [text for text in blocks("sh", "console") if "ray start --head" in text]
    assert len(starts) >= 2
    for text in starts:
        assert "RAY_AUTH_MODE=token" in text
    clusters = [part["spec"]["rayClusterConfig"] for part in documents() if part.get("kind") == "RayService"]
    assert clusters
    assert all(cluster["authOptions"] == {"mode": "token"} for cluster in clusters)


def test_every_cluster_that_is_documented_has_bounds_in_its_proxy() -> None:
    """By Ray's variable, which proxies read where they start: in the shell, in the image, on each node."""
    for text in blocks("sh", "console"):
        if "ray start" in text and "docker run" not in text and "--address" not in text:
            assert f"{proxy_bounds.VARIABLE}={proxy_bounds.IMPORT_PATH}" in text
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ENV {proxy_bounds.VARIABLE}={proxy_bounds.IMPORT_PATH}" in dockerfile
    makefile = (ROOT / "Makefile").read_text()
    assert "/vitray serve" in makefile, "which sets it (test_cli.py)"
    assert "/serve run" not in makefile
    assert import_attr(proxy_bounds.IMPORT_PATH) is proxy_bounds.bounded


def test_every_configuration_that_is_documented_starts_closed() -> None:
    checked = 0
    for part in documents():
        config = yaml.safe_load(part["spec"]["serveConfigV2"]) if part.get("kind") == "RayService" else part
        for application in config.get("applications", []):
            auth = AppConfig.model_validate(application.get("args", {})).ingress.auth
            host = config.get("http_options", {}).get("host", "127.0.0.1")
            assert bind_refusal(auth, host) is None
            assert auth.mode != "none"
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nobody_is_told_to_open_the_dashboard(page: Path) -> None:
    assert "--dashboard-host" not in page.read_text()
    assert "0.0.0.0:8265" not in page.read_text()


def test_weights_and_code_come_from_safe_sources() -> None:
    """No pickle is loaded, and no code from a checkpoint, anywhere in what is shipped."""
    unsafe = re.compile(
        r"torch\.load\(|pickle\.loads?\(|cloudpickle|np\.load\(|yaml\.load\(|trust_remote_code\s*=\s*True|marshal\.loads"
    )
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in ("configs", "encoder", "deployments", "training", "scripts", "examples")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in file.read_text().splitlines()
        if unsafe.search(line) and str(file.relative_to(ROOT)) not in OWN_PICKLES
    ]
    assert found == []
