"""Creates `.venv` and installs the project into it; if nothing has changed, it takes a fraction of a second.

Run by `make setup`. Standard library only, because nothing is installed yet, and without knowledge of the packages:
pyproject.toml has their versions. All effects on the machine go through a `Machine`, so that the decisions can be
tested without an installation.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
RECORD_NAME = "vitray-setup.json"
LOG_NAME = "vitray-setup.log"
CONSTRAINTS_NAME = "vitray-constraints.txt"
# PyTorch publishes the `+cpu` builds of torch here; they are not on PyPI.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_WHEEL_MACHINES = ("x86_64", "aarch64")
BACKENDS = ("cpu", "gpu")
LARGE_DOWNLOAD_MB = 50.0
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
"""uv's option for each of pip's settings for package sources. Each setting has one or several values."""


class SetupError(Exception):
    """An error that the user can correct; its text is shown unchanged."""


class Machine(Protocol):
    """The effects of the set-up on its environment."""

    def succeeds(self, command: Sequence[str]) -> bool:
        """Runs the command without output; returns False also if the program does not exist."""

    def stream(self, command: Sequence[str]) -> Iterator[str]:
        """Yields the lines of stdout and stderr; raises CalledProcessError after the last if the command failed."""

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Record:
    """State of the last completed set-up, stored in the environment so that both are removed together."""

    fingerprint: str
    root: str  # written into console scripts: a checkout that was moved or copied needs its own environment
    extras: str
    chosen: bool  # by the user with EXTRAS=

    @staticmethod
    def read(path: Path) -> Record | None:
        try:
            fields = json.loads(path.read_text())
            return Record(**{name: fields[name] for name in ("fingerprint", "root", "extras", "chosen")})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def fingerprint(root: Path) -> str:
    """Returns a hash of the files that determine the result of a set-up: requirements, locks and this script."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "scripts/setup.py", *(f"locks/{backend}.txt" for backend in BACKENDS)):
        digest.update(b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def backend(extras: str) -> str | None:
    """Returns the one of BACKENDS that is among the extras, or None. Raises SetupError if there are two."""
    named = [name for name in BACKENDS if name in extras.split(",")]
    if len(named) > 1:
        raise SetupError(f"EXTRAS={extras}: cpu and gpu exclude each other, both bring a package named vllm.")
    return named[0] if named else None


def choose_extras(requested: str | None, record: Record | None, machine: Machine) -> tuple[str, bool]:
    """Returns the extras and whether the user chose them.

    They are the user's choice, else the choice recorded for this environment, else chosen by the machine's hardware.
    """
    if requested:
        extras = ",".join(part.strip() for part in requested.split(",") if part.strip())
        backend(extras)
        return extras, True
    if record is not None and record.chosen:
        return record.extras, True
    return "gpu,dev" if machine.succeeds(["nvidia-smi", "-L"]) else "cpu,dev", False


def cpu_torch(pyproject: Path) -> str:
    """Returns the requirement for the CPU build, such as `torch==2.13.0+cpu`, from the pin in the `cpu` extra."""
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    pins = [requirement for requirement in extras["cpu"] if requirement.startswith("torch==")]
    if len(pins) != 1:
        raise SetupError("pyproject.toml: the extra [cpu] must pin torch exactly once.")
    return f"{pins[0]}+cpu"


def locked(lock: str) -> str:
    """Returns the versions of a lock without hashes, which pip cannot check together with a project in a folder."""
    return "\n".join(line.removesuffix(" \\") for line in lock.splitlines() if re.match(r"[A-Za-z0-9]", line)) + "\n"


def check_cpu_platform(system: str, machine_name: str) -> None:
    if system != "Linux" or machine_name not in CPU_WHEEL_MACHINES:
        raise SetupError(
            f"vLLM for the CPU has wheels for Linux on {' and '.join(CPU_WHEEL_MACHINES)} only; this is {system} on "
            f"{machine_name}.\nA container works: docker build --target cpu -t vitray:cpu ."
        )


def ensure_cpu_torch(pip: Sequence[str], requirement: str, machine: Machine) -> None:
    """Ensures that pip finds the CPU build of torch: in pip's default index, else in PyTorch's own.

    PyTorch's index is asked only if needed, with a short timeout, and for torch only: an unreachable index costs
    minutes of retries, and an index for all packages could serve packages that it does not own.
    """
    probe = [*pip, "install", "--dry-run", "--no-deps", "-qq", requirement]
    if machine.succeeds(probe):
        return
    machine.say(f"{requirement} is not where pip looks by default; asking {CPU_TORCH_INDEX}")
    only_there = ["--index-url", CPU_TORCH_INDEX]
    if not machine.succeeds([*probe, *only_there, "--retries", "1", "--timeout", "10"]):
        raise SetupError(
            f"Cannot find {requirement}: neither where pip looks by default nor at {CPU_TORCH_INDEX}.\n"
            "Either let this machine reach that address and run `make setup` again, or fetch the wheel on one that "
            f"does:\n    pip download --no-deps --index-url {CPU_TORCH_INDEX} '{requirement}'\n"
            "and then, with the folder it lies in:  PIP_FIND_LINKS=/that/folder make setup\n"
            f"The wheel must fit this Python, {platform.python_version()}; "
            "another one: make clean setup PYTHON=/path/to/it"
        )
    follow([*pip, "install", "--no-deps", "--progress-bar", "off", *only_there, requirement], machine)


def progress(line: str) -> str | None:
    """Returns the part of a line of pip's or uv's output to show to the user: large downloads and the last phase."""
    download = re.match(r"\s*Downloading (\S+).*\((\d+(?:\.\d+)?) ?([MG]i?B)\)", line)
    if download:
        megabytes = float(download[2]) * (1000 if download[3].startswith("G") else 1)
        name = download[1].rsplit("/", 1)[-1]
        return f"downloading {name} ({download[2]} {download[3]})" if megabytes >= LARGE_DOWNLOAD_MB else None
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    if prepared := re.match(r"Prepared (\d+) packages", line):
        return f"installing {prepared[1]} packages"
    return None


def complaint(lines: Sequence[str]) -> str:
    """Returns the part of pip's output that explains a failure: from its first error, else its end; no warnings."""
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("WARNING:")]
    errors = [number for number, line in enumerate(kept) if line.lstrip().lower().startswith("error:")]
    return "\n".join(kept[errors[0] :][:60] if errors else kept[-15:])


def follow(command: Sequence[str], machine: Machine) -> None:
    """Runs pip, shows the relevant output, and raises SetupError with the reason of a failure."""
    lines: list[str] = []
    try:
        for line in machine.stream(command):
            lines.append(line)
            shown = progress(line)
            if shown is not None:
                machine.say(shown)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{complaint(lines)}\npip failed; its whole output is in .venv/{LOG_NAME}") from error


def uv_options(pip_settings: Iterable[str]) -> list[str]:
    """Returns the options that make uv use pip's package sources. `pip_settings`: the lines of `pip config list`."""
    found: dict[str, str] = {}
    lines = list(pip_settings)
    for section in ("global.", "install.", ":env:."):  # in pip's order of precedence, lowest first
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(section):
                found[name.removeprefix(section)] = str(ast.literal_eval(value))
    offline = ["--no-index"] if found.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    return offline + [
        part
        for setting, option in UV_OPTIONS.items()
        for value in found.get(setting, "").split()
        for part in (option, value)
    ]


def install(pip: Sequence[str], requirements: Sequence[str], machine: Machine) -> None:
    """Installs with uv, which downloads in parallel and leaves compilation to imports; with pip if uv fails."""
    python = pip[0]
    try:
        follow([*pip, "install", "-q", "uv"], machine)
        # pip takes the best version of all indexes; uv's default stops at the first index that has the package.
        like_pip = ["--index-strategy", "unsafe-best-match", "--system-certs"]
        like_pip += uv_options(machine.stream([*pip, "config", "list"]))
        uv = str(Path(python).with_name("uv"))
        follow([uv, "pip", "install", "--python", python, *like_pip, *requirements], machine)
    except (SetupError, subprocess.CalledProcessError):
        machine.say("uv did not succeed; installing with pip, which takes minutes longer")
        follow([*pip, "install", "--progress-bar", "off", *requirements], machine)


def ensure_venv(venv: Path, record: Record | None, wanted: Record, machine: Machine) -> Path:
    """Returns the environment's Python. Creates the environment if it is missing, broken or incompatible."""
    python = venv / "bin" / "python"
    if record is not None and record.root != wanted.root:
        machine.say(".venv was made in another folder; making it anew")
    elif record is not None and {backend(record.extras), backend(wanted.extras)} == set(BACKENDS):
        machine.say(".venv holds the packages of the other kind of machine; making it anew")
    elif machine.succeeds([str(python), "-m", "pip", "--version"]):
        return python
    else:
        machine.say(f"making .venv with Python {platform.python_version()}")
    follow([sys.executable, "-m", "venv", "--clear", str(venv)], machine)
    return python


def set_up(root: Path, requested: str | None, machine: Machine) -> bool:
    """Sets up the environment and returns whether anything had to be done. Raises SetupError."""
    venv = root / ".venv"
    record = Record.read(venv / RECORD_NAME)
    extras, chosen = choose_extras(requested, record, machine)
    wanted = Record(fingerprint(root), str(root), extras, chosen)
    if record == wanted and (venv / "bin" / "python").exists():  # a link, whose interpreter may have been removed
        return False
    on_cpu = backend(extras) == "cpu"
    if on_cpu:
        check_cpu_platform(platform.system(), platform.machine())
    python = ensure_venv(venv, record, wanted, machine)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Naming the pin on the command line keeps pip from downloading the newest torch and then discarding it.
    pinned = [cpu_torch(root / "pyproject.toml")] if on_cpu else []
    for requirement in pinned:
        ensure_cpu_torch(pip, requirement, machine)
    constrained: list[str] = []
    if (chosen_backend := backend(extras)) is not None:
        constraints = venv / CONSTRAINTS_NAME
        constraints.parent.mkdir(exist_ok=True)
        constraints.write_text(locked((root / "locks" / f"{chosen_backend}.txt").read_text()))
        constrained = ["--constraint", str(constraints)]
    patience = f"; the first time takes {'one to five minutes' if on_cpu else 'minutes'}" if record is None else ""
    machine.say(f"installing vitray[{extras}]{patience}")
    install(pip, ["--editable", f"{root}[{extras}]", *pinned, *constrained], machine)
    wanted.write(venv / RECORD_NAME)
    return True


class ThisMachine:
    """The `Machine` that runs commands; keeps a log of those that it streamed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._log_mode = "w"  # each set-up starts a new log

    def succeeds(self, command: Sequence[str]) -> bool:
        if shutil.which(command[0]) is None:
            return False
        quiet = subprocess.DEVNULL
        return subprocess.run(command, check=False, stdout=quiet, stderr=quiet).returncode == 0

    def stream(self, command: Sequence[str]) -> Iterator[str]:
        lines: list[str] = []
        piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        try:
            with piped as process:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    yield line.rstrip("\n")
        finally:
            if self._log.parent.is_dir():  # the log is inside the environment, which may not exist yet
                with self._log.open(self._log_mode) as log:
                    log.writelines([f"$ {' '.join(command)}\n", *lines])
                self._log_mode = "a"
        if piped.returncode != 0:
            raise subprocess.CalledProcessError(piped.returncode, list(command))

    def say(self, text: str) -> None:
        print(f"vitray: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes .venv and installs the project into it.")
    parser.add_argument("--extras", help="comma-separated; default: gpu,dev where there is an NVIDIA GPU, else cpu,dev")
    arguments = parser.parse_args()
    machine = ThisMachine(ROOT / ".venv" / LOG_NAME)
    started = time.monotonic()
    try:
        worked = set_up(ROOT, arguments.extras, machine)
    except SetupError as error:
        print(f"vitray: the set-up did not finish.\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vitray: set-up interrupted; run it again to continue.", file=sys.stderr)
        return 130
    if worked:
        machine.say(f"ready after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
