"""The Dockerfile against pyproject.toml, scripts/setup.py and the wheels that it installs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from scripts import setup
from tests.programs import output_of

ROOT = Path(__file__).parents[3]


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[list[str]]:
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    return [line.split()[1:] for line in lines if line.startswith(f"{name} ")]


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    sources = [source for *named, _target in instructions("COPY") for source in named]
    assert {"pyproject.toml", "encoder", "configs", "deployments", "serve_config.yaml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in let_in), source


# What brings the libraries that are not in any wheel: Debian's packages, or the image that ours is made from.
BRINGS = {
    "libnuma.so.1": "libnuma1",
    "libstdc++.so.6": "g++",
    "libgcc_s.so.1": "g++",
    "libgomp.so.1": "g++",
    "librt.so.1": "base",
    "libdl.so.2": "base",
    "libpthread.so.0": "base",
    "libm.so.6": "base",
    "libc.so.6": "base",
}


@pytest.mark.skipif(
    importlib.metadata.version("torch").partition("+")[2] != "cpu",
    reason="it looks at vLLM for the CPU, which is there",
)
def test_the_dockerfile_installs_the_libraries_that_vllm_loads() -> None:
    """Without libnuma vLLM for the CPU warns once and dies later, of an operator that is missing."""
    installed = {word for words in instructions("RUN") if "apt-get" in words for word in words}
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    extensions = sorted(Path(package.submodule_search_locations[0]).glob("*.so"))
    assert extensions
    needed = set()
    for extension in extensions:
        listed = output_of(["ldd", extension])
        needed |= set(re.findall(r"^\t(\S+) => /(?:usr/)?lib", listed, re.MULTILINE))
    assert "libc.so.6" in needed
    assert [name for name in sorted(needed) if BRINGS.get(name) not in ("base", *installed)] == []


def test_the_dockerfile_installs_what_pyproject_names() -> None:
    runs = "\n".join(" ".join(words) for words in instructions("RUN"))
    extras = re.findall(r"'\.\[([a-z0-9,-]+)\]'", runs)
    assert sorted(extras) == ["cpu", "gpu"]
    assert set(extras) <= set(project_table()["optional-dependencies"])
    assert f"--index-url {setup.CPU_TORCH_INDEX} '{setup.cpu_torch(ROOT / 'pyproject.toml')}'" in runs


def test_every_package_that_is_copied_is_installed() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in found}
    copied = {source for *named, _target in instructions("COPY") for source in named}
    assert packages <= copied
    assert all((ROOT / package / "__init__.py").exists() for package in packages)
