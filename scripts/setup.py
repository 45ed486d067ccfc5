"""Makes `.venv` and installs the project into it; a second run finds everything done and takes a fraction of a second.

Run by `make setup`. Standard library only, since nothing is installed yet, and it knows nothing of what it installs:
versions are in pyproject.toml. Everything that touches the machine goes through a `Machine`, so that the decisions can
be tested without installing anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
RECORD_NAME = "vitray-setup.json"
LOG_NAME = "vitray-setup.log"
CONSTRAINTS_NAME = "vitray-constraints.txt"
# The `+cpu` builds of torch are not on PyPI; this is where PyTorch publishes them.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_WHEEL_MACHINES = ("x86_64", "aarch64")
BACKENDS = ("cpu", "gpu")
LARGE_DOWNLOAD_MB = 50.0


class SetupError(Exception):
    """Something the user can act on; its text is shown as it is."""


class Machine(Protocol):
    """What the set-up does to the outside world."""

    def succeeds(self, command: Sequence[str]) -> bool:
        """Runs quietly; False also where the program is not there."""

    def stream(self, command: Sequence[str]) -> Iterator[str]:
        """Yields the lines of stdout and stderr; raises CalledProcessError after the last if the command failed."""

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Record:
    """What the last finished set-up did; lies in the environment, so that it goes when the environment goes."""

    fingerprint: str
    root: str  # console scripts carry it: a checkout that was moved or copied needs an environment of its own
    extras: str
    chosen: bool  # by the user, with EXTRAS=

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
    """Changes with whatever decides the outcome of a set-up: what is wanted, and how it is done."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "scripts/setup.py", *(f"locks/{backend}.txt" for backend in BACKENDS)):
        digest.update(b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def backend(extras: str) -> str | None:
    """The one of BACKENDS that is among the extras, None if there is none; SetupError if there are two."""
    named = [name for name in BACKENDS if name in extras.split(",")]
    if len(named) > 1:
        raise SetupError(f"EXTRAS={extras}: cpu and gpu exclude each other, both bring a package named vllm.")
    return named[0] if named else None


def choose_extras(requested: str | None, record: Record | None, machine: Machine) -> tuple[str, bool]:
    """The user's choice, else the choice made when this environment was set up, else what the machine has.

    Returns the extras and whether the user chose them.
    """
    if requested:
        extras = ",".join(part.strip() for part in requested.split(",") if part.strip())
        backend(extras)
        return extras, True
    if record is not None and record.chosen:
        return record.extras, True
    return "gpu,dev" if machine.succeeds(["nvidia-smi", "-L"]) else "cpu,dev", False


def cpu_torch(pyproject: Path) -> str:
    """The requirement for the CPU build, such as `torch==2.13.0+cpu`, from the pin in the `cpu` extra."""
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    pins = [requirement for requirement in extras["cpu"] if requirement.startswith("torch==")]
    if len(pins) != 1:
        raise SetupError("pyproject.toml: the extra [cpu] must pin torch exactly once.")
    return f"{pins[0]}+cpu"


def locked(lock: str) -> str:
    """The versions of a lock without its hashes, which pip cannot ask for with a project in a folder."""
    return "\n".join(line.removesuffix(" \\") for line in lock.splitlines() if re.match(r"[A-Za-z0-9]", line)) + "\n"


def check_cpu_platform(system: str, machine_name: str) -> None:
    if system != "Linux" or machine_name not in CPU_WHEEL_MACHINES:
        raise SetupError(
            f"vLLM for the CPU has wheels for Linux on {' and '.join(CPU_WHEEL_MACHINES)} only; this is {system} on "
            f"{machine_name}.\nA container works: docker build --target cpu -t vitray:cpu ."
        )


def ensure_cpu_torch(pip: Sequence[str], requirement: str, machine: Machine) -> None:
    """Sees to it that pip finds the CPU build of torch: where pip looks by default, else in PyTorch's own index.

    That index is asked only when it is needed, briefly, and for torch alone: an index that cannot be reached costs
    minutes of retries, and one that is named for everything may answer for packages that are not its own.
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
            f"The wheel must fit this Python, {platform.python_version()}; another one: make setup PYTHON=/path/to/it"
        )
    follow([*pip, "install", "--no-deps", "--progress-bar", "off", *only_there, requirement], machine)


def progress(line: str) -> str | None:
    """What a line of pip's output is worth to somebody who waits: large downloads and the last phase."""
    download = re.match(r"\s*Downloading (\S+).*\((\d+(?:\.\d+)?) (MB|GB)\)", line)
    if download:
        megabytes = float(download[2]) * (1000 if download[3] == "GB" else 1)
        name = download[1].rsplit("/", 1)[-1]
        return f"downloading {name} ({download[2]} {download[3]})" if megabytes >= LARGE_DOWNLOAD_MB else None
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    return None


def complaint(lines: Sequence[str]) -> str:
    """The part of pip's output that says why it failed: from its first error on, else its end, without its warnings."""
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith("WARNING:")]
    errors = [number for number, line in enumerate(kept) if line.lstrip().lower().startswith("error:")]
    return "\n".join(kept[errors[0] :][:60] if errors else kept[-15:])


def follow(command: Sequence[str], machine: Machine) -> None:
    """Runs pip, shows what matters of its output, and turns a failure into a SetupError with the reason."""
    lines: list[str] = []
    try:
        for line in machine.stream(command):
            lines.append(line)
            shown = progress(line)
            if shown is not None:
                machine.say(shown)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"{complaint(lines)}\npip failed; all that it said is in .venv/{LOG_NAME}") from error


def ensure_venv(venv: Path, record: Record | None, wanted: Record, machine: Machine) -> Path:
    """Returns the environment's Python; makes the environment where it is missing, broken, or cannot be built upon."""
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
    """Returns whether there was anything to do. Raises SetupError."""
    venv = root / ".venv"
    record = Record.read(venv / RECORD_NAME)
    extras, chosen = choose_extras(requested, record, machine)
    wanted = Record(fingerprint(root), str(root), extras, chosen)
    if record == wanted and (venv / "bin" / "python").exists():  # a link to an interpreter that may have gone
        return False
    on_cpu = backend(extras) == "cpu"
    if on_cpu:
        check_cpu_platform(platform.system(), platform.machine())
    python = ensure_venv(venv, record, wanted, machine)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Named on the command line, the pin is known from the start: pip would fetch the newest torch first, and drop it.
    pinned = [cpu_torch(root / "pyproject.toml")] if on_cpu else []
    for requirement in pinned:
        ensure_cpu_torch(pip, requirement, machine)
    constrained: list[str] = []
    if (chosen_backend := backend(extras)) is not None:
        constraints = venv / CONSTRAINTS_NAME
        constraints.parent.mkdir(exist_ok=True)
        constraints.write_text(locked((root / "locks" / f"{chosen_backend}.txt").read_text()))
        constrained = ["--constraint", str(constraints)]
    patience = f"; the first time takes {'about two' if on_cpu else 'several'} minutes" if record is None else ""
    machine.say(f"installing vitray[{extras}]{patience}")
    follow(
        [*pip, "install", "--progress-bar", "off", "--editable", f"{root}[{extras}]", *pinned, *constrained], machine
    )
    wanted.write(venv / RECORD_NAME)
    return True


class ThisMachine:
    """The real one; keeps a log of the commands that it streamed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._log_mode = "w"  # a new set-up starts a new log

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
            if self._log.parent.is_dir():  # not before the environment is made
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
        print("vitray: set-up interrupted; the next one goes on where this one stopped.", file=sys.stderr)
        return 130
    if worked:
        machine.say(f"ready after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
