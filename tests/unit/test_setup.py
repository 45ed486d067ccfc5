"""The set-up's decisions, with a machine that only pretends, and the files that must agree with pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from scripts import setup
from tests.programs import output_of

ROOT = Path(__file__).parent.parent.parent
PIP = ["python", "-m", "pip"]
TORCH = "torch==2.13.0+cpu"


class FakeMachine:
    """Answers from a rule, writes down every command, and makes the environment's Python where it is asked to."""

    def __init__(self, succeeds: Callable[[str], bool] = lambda command: True) -> None:
        self._succeeds = succeeds
        self.commands: list[str] = []
        self.said: list[str] = []
        self.output: list[str] = []
        self.fails = ""

    def succeeds(self, command: Sequence[str]) -> bool:
        self.commands.append(" ".join(command))
        return self._succeeds(self.commands[-1])

    def stream(self, command: Sequence[str]) -> Iterator[str]:
        self.commands.append(" ".join(command))
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        yield from self.output
        if self.fails and self.fails in self.commands[-1]:
            raise subprocess.CalledProcessError(1, list(command))

    def say(self, text: str) -> None:
        self.said.append(text)

    def ran(self, part: str) -> list[str]:
        return [command for command in self.commands if part in command]


def without_gpu(command: str) -> bool:
    return "nvidia-smi" not in command


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(setup.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "locks").mkdir()
    for name in ("pyproject.toml", "scripts/setup.py", "locks/cpu.txt", "locks/gpu.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def missing_venv(command: str) -> bool:
    return "nvidia-smi" not in command and "pip --version" not in command


def test_a_fresh_checkout_is_installed_once(checkout: Path) -> None:
    machine = FakeMachine(missing_venv)
    assert setup.set_up(checkout, None, machine) is True
    assert len(machine.ran("-m venv --clear")) == 1
    constraints = checkout / ".venv" / setup.CONSTRAINTS_NAME
    wanted = f"--editable {checkout}[cpu,dev] {TORCH} --constraint {constraints}"
    assert machine.ran("--editable")[0].endswith(wanted)
    assert constraints.read_text() == setup.locked((ROOT / "locks" / "cpu.txt").read_text())

    again = FakeMachine(without_gpu)
    assert setup.set_up(checkout, None, again) is False
    assert again.commands == ["nvidia-smi -L"]


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/setup.py", "locks/cpu.txt"])
def test_a_change_of_what_is_wanted_installs_again_into_the_same_environment(checkout: Path, name: str) -> None:
    setup.set_up(checkout, None, FakeMachine(missing_venv))
    (checkout / name).write_text((checkout / name).read_text() + "\n# changed\n")
    machine = FakeMachine(without_gpu)
    assert setup.set_up(checkout, None, machine) is True
    assert machine.ran("-m venv") == []
    assert len(machine.ran("--editable")) == 1


def test_an_interrupted_install_is_not_taken_for_done(checkout: Path) -> None:
    machine = FakeMachine(missing_venv)
    machine.fails = "--editable"
    with pytest.raises(setup.SetupError):
        setup.set_up(checkout, None, machine)
    assert setup.set_up(checkout, None, FakeMachine(without_gpu)) is True


def test_an_interpreter_that_has_gone_makes_the_environment_anew(checkout: Path) -> None:
    setup.set_up(checkout, None, FakeMachine(missing_venv))
    (checkout / ".venv" / "bin" / "python").unlink()
    machine = FakeMachine(missing_venv)
    assert setup.set_up(checkout, None, machine) is True
    assert len(machine.ran("-m venv --clear")) == 1


def test_a_copied_checkout_gets_an_environment_of_its_own(checkout: Path, tmp_path: Path) -> None:
    """The console scripts in `.venv/bin` name the folder that they were made in."""
    setup.set_up(checkout, None, FakeMachine(missing_venv))
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    checkout.rename(moved)
    machine = FakeMachine(without_gpu)
    assert setup.set_up(moved, None, machine) is True
    assert len(machine.ran("-m venv --clear")) == 1


def test_a_gpu_machine_gets_vllm_with_cuda_and_no_search_for_a_cpu_torch(checkout: Path) -> None:
    machine = FakeMachine(lambda command: "pip --version" not in command)
    setup.set_up(checkout, None, machine)
    constraints = checkout / ".venv" / setup.CONSTRAINTS_NAME
    assert machine.ran("--editable")[0].endswith(f"{checkout}[gpu,dev] --constraint {constraints}")
    assert "vllm==0.26.0" in constraints.read_text()
    assert machine.ran("torch==") == []


def test_the_users_choice_stays_until_another_is_made(checkout: Path) -> None:
    with_gpu = FakeMachine(lambda command: "pip --version" not in command)
    setup.set_up(checkout, "cpu, test", with_gpu)
    assert f"{checkout}[cpu,test]" in with_gpu.ran("--editable")[0]
    assert setup.set_up(checkout, None, FakeMachine()) is False  # nvidia-smi works, and does not overrule

    machine = FakeMachine()
    assert setup.set_up(checkout, "gpu,test", machine) is True
    assert len(machine.ran("-m venv --clear")) == 1  # the two vllm packages must not lie over each other


def test_both_backends_at_once_are_refused(checkout: Path) -> None:
    with pytest.raises(setup.SetupError, match="exclude each other"):
        setup.set_up(checkout, "cpu,gpu", FakeMachine())


def test_a_platform_without_wheels_is_told_before_anything_is_made(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.platform, "system", lambda: "Darwin")
    machine = FakeMachine(without_gpu)
    with pytest.raises(setup.SetupError, match="Darwin on x86_64"):
        setup.set_up(checkout, None, machine)
    assert machine.commands == ["nvidia-smi -L"]


def test_the_cpu_torch_is_the_pin_of_the_extra() -> None:
    assert setup.cpu_torch(ROOT / "pyproject.toml") == TORCH


def test_a_torch_that_pip_finds_needs_no_second_index() -> None:
    machine = FakeMachine()
    setup.ensure_cpu_torch(PIP, TORCH, machine)
    assert machine.ran(setup.CPU_TORCH_INDEX) == []


def test_pytorchs_index_is_asked_briefly_and_for_torch_alone() -> None:
    machine = FakeMachine(lambda command: setup.CPU_TORCH_INDEX in command)
    setup.ensure_cpu_torch(PIP, TORCH, machine)
    default, probe, install = machine.commands
    assert "--index-url" not in default
    assert probe.endswith("--retries 1 --timeout 10")
    assert install.endswith(f"--index-url {setup.CPU_TORCH_INDEX} {TORCH}")
    assert all("--no-deps" in command for command in machine.commands)


def test_a_torch_that_is_nowhere_is_explained() -> None:
    machine = FakeMachine(lambda command: False)
    with pytest.raises(setup.SetupError) as caught:
        setup.ensure_cpu_torch(PIP, TORCH, machine)
    for part in (TORCH, setup.CPU_TORCH_INDEX, "PIP_FIND_LINKS=", "make setup PYTHON="):
        assert part in str(caught.value)
    assert len(machine.commands) == 2


def test_a_failure_of_pip_shows_its_errors_without_its_warnings() -> None:
    machine = FakeMachine()
    machine.fails = "install"
    machine.output = [
        "Collecting vitray",
        "WARNING: Location 'file:///nowhere' is ignored: it is neither a file nor a directory.",
        "ERROR: Could not find a version that satisfies the requirement nothing==1",
        "WARNING: Location 'file:///nowhere' is ignored: it is neither a file nor a directory.",
        "ERROR: No matching distribution found for nothing==1",
    ]
    with pytest.raises(setup.SetupError) as caught:
        setup.follow(["pip", "install", "nothing==1"], machine)
    assert "nothing==1" in str(caught.value)
    assert str(caught.value).count("ERROR: ") == 2
    assert "WARNING" not in str(caught.value)
    assert "Collecting" not in str(caught.value)


def test_a_failed_build_shows_what_the_compiler_said() -> None:
    said = ["Collecting x", "  error: subprocess-exited-with-error", "  gcc: not found", "ERROR: Failed to build x"]
    assert setup.complaint(said) == "\n".join(said[1:])
    assert setup.complaint(["Killed"]) == "Killed"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  Downloading https://host/torch-2.13.0%2Bcpu-cp311.whl (184.2 MB)", True),
        ("  Downloading torch-2.14.0-cp311.whl (1.1 GB)", True),
        ("  Downloading idna-3.20.whl (75 kB)", False),
        ("  Downloading ray.whl.metadata (12.0 MB)", False),
        ("Installing collected packages: a, b, c", True),
        ("WARNING: Location 'file:///nowhere' is ignored", False),
        ("Requirement already satisfied: idna", False),
    ],
)
def test_progress_shows_what_takes_long(line: str, shown: bool) -> None:
    assert (setup.progress(line) is not None) is shown


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = setup.Record("f" * 64, "/somewhere", "cpu,dev", chosen=False)
    record.write(path)
    assert setup.Record.read(path) == record
    for damaged in ("", "[]", '{"fingerprint": "f"}'):
        path.write_text(damaged)
        assert setup.Record.read(path) is None


def test_the_real_machine_streams_logs_and_fails_as_it_should(tmp_path: Path) -> None:
    machine = setup.ThisMachine(tmp_path / "log")
    assert machine.succeeds([sys.executable, "-c", ""])
    assert not machine.succeeds([sys.executable, "-c", "raise SystemExit(1)"])
    assert not machine.succeeds(["no-such-program-anywhere"])
    lines: list[str] = []
    program = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)"
    with pytest.raises(subprocess.CalledProcessError):
        lines.extend(machine.stream([sys.executable, "-c", program]))
    assert lines == ["out", "err"]
    assert (tmp_path / "log").read_text().endswith("out\nerr\n")


# --- scripts/find_python.sh


def find_python(path: Path, *candidates: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{path}:/usr/bin:/bin"}
    command = ["/bin/sh", str(ROOT / "scripts" / "find_python.sh"), *candidates]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake_python(path: Path, name: str, output: str, status: int) -> str:
    program = path / name
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit {status}\n")
    program.chmod(0o755)
    return name


def test_a_python_that_fits_is_found_behind_those_that_do_not(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.9", 3)
    fake_python(tmp_path, "python3.12", "pyenv: python3.12: command not found", 127)
    fake_python(tmp_path, "python3.11", "3.11\n/opt/python3.11", 0)
    assert find_python(tmp_path).stdout == "/opt/python3.11\n"


def test_the_probe_accepts_the_python_that_runs_this(tmp_path: Path) -> None:
    found = find_python(tmp_path, sys.executable)
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_no_python_that_fits_is_explained(tmp_path: Path) -> None:
    old = fake_python(tmp_path, "python-old", "3.9", 3)
    broken = fake_python(tmp_path, "python-broken", "", 127)
    found = find_python(tmp_path, old, broken, "python-none")
    assert (found.returncode, found.stdout) == (1, "")
    assert "found: python-old is 3.9, python-broken does not run\n" in found.stderr


def test_a_missing_venv_module_is_told_apart(tmp_path: Path) -> None:
    found = find_python(tmp_path, fake_python(tmp_path, "python-bare", "3.11", 4))
    assert found.returncode == 1
    assert "apt install python3.11-venv" in found.stderr


# --- files that must agree


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_range_of_pythons_is_the_same_everywhere() -> None:
    lower, upper = re.findall(r"3\.(\d+)", project_table()["requires-python"])
    script = (ROOT / "scripts" / "find_python.sh").read_text()
    assert f"(3, {lower}) <= sys.version_info[:2] < (3, {upper})" in script
    assert f"needs Python 3.{lower} to 3.{int(upper) - 1}" in script


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
    assert f"--index-url {setup.CPU_TORCH_INDEX} '{TORCH}'" in runs


def test_every_package_that_is_copied_is_installed() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in found}
    copied = {source for *named, _target in instructions("COPY") for source in named}
    assert packages <= copied
    assert all((ROOT / package / "__init__.py").exists() for package in packages)
