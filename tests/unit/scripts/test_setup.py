"""The set-up's decisions, with a machine that only pretends, and the files that must agree with pyproject.toml."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scripts import setup

ROOT = Path(__file__).parents[3]
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
        """Part of the commands that fail."""

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
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
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


def test_uv_looks_where_pip_looks() -> None:
    listed = [
        ":env:.cert='/etc/ssl/ca.crt'",
        ":env:.find-links='/wheels'",
        "global.extra-index-url='file:///one https://two/simple'",
        "global.find-links='/older'",
        "global.index-url='https://first/simple'",
        "install.trusted-host='two'",
        "WARNING: a line that is no setting",
    ]
    assert setup.uv_options(listed) == [
        *("--default-index", "https://first/simple"),
        *("--index", "file:///one", "--index", "https://two/simple"),
        *("--find-links", "/wheels"),
        *("--allow-insecure-host", "two"),
    ]
    assert setup.uv_options(["global.no-index='true'"]) == ["--no-index"]
    assert setup.uv_options([]) == []


def test_packages_are_installed_with_uv_into_the_environment(checkout: Path) -> None:
    machine = FakeMachine(missing_venv)
    machine.output = ["global.extra-index-url='file:///mirror'"]
    setup.set_up(checkout, None, machine)
    (command,) = machine.ran("--editable")
    scripts = checkout / ".venv" / "bin"
    assert command.startswith(f"{scripts / 'uv'} pip install --python {scripts / 'python'} ")
    assert "--index file:///mirror" in command


@pytest.mark.parametrize("fails", ["install -q uv", "config list", "uv pip install"])
def test_pip_installs_where_uv_does_not(checkout: Path, fails: str) -> None:
    machine = FakeMachine(missing_venv)
    machine.fails = fails
    assert setup.set_up(checkout, None, machine) is True
    assert "-m pip" in machine.ran("--editable")[-1]
    assert any("pip" in text for text in machine.said)


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
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
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
    for part in (TORCH, setup.CPU_TORCH_INDEX, "PIP_FIND_LINKS=", "make clean setup PYTHON="):
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
        ("Downloading triton (272.5MiB)", True),
        ("Downloading idna (66.0KiB)", False),
        ("Installing collected packages: a, b, c", True),
        ("Prepared 240 packages in 32.88s", True),
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


def test_the_range_of_pythons_is_the_same_everywhere() -> None:
    lower, upper = re.findall(
        r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    script = (ROOT / "scripts" / "find_python.sh").read_text()
    assert f"(3, {lower}) <= sys.version_info[:2] < (3, {upper})" in script
    assert f"needs Python 3.{lower} to 3.{int(upper) - 1}" in script
