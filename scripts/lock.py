"""Writes `locks/cpu.txt` and `locks/gpu.txt`: every package that is shipped, with one version and its files' hashes.

Run by `make lock` after pyproject.toml has changed, or to take newer versions in. The GPU's lock is held to what was
run on a GPU. The CPU's torch is not in its lock, since that build is not on PyPI: pyproject.toml pins it, and where uv
cannot find it, PIP_FIND_LINKS names a folder that holds it. `scripts/setup.py` takes the versions from here, the
Dockerfile the hashes too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
OLDEST_PYTHON = "3.11"
# What ran on an NVIDIA H200, as README's table tells; newer versions are allowed by pyproject.toml and not in the lock.
TESTED_ON_GPU = ("vllm==0.26.0", "torch==2.11.0", "transformers==5.17.0")
ABOUT = """\
# Written by scripts/lock.py (make lock). For Python 3.11 and newer; lines with a marker are for some machines only.
"""


def command(extra: str, constraints: Path, output: Path) -> list[str]:
    """Resolves for every platform at once, so that one file serves every Python and processor."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    if extra == "cpu":
        options += ["--no-emit-package", "torch"]
    if folder := os.environ.get("PIP_FIND_LINKS"):
        options += ["--find-links", folder]
    return [
        *(str(uv), "pip", "compile", str(ROOT / "pyproject.toml"), "--extra", extra, *options),
        *("--python-version", OLDEST_PYTHON, "--constraint", str(constraints), "--output-file", str(output)),
    ]


def lock(extra: str) -> int:
    """Writes one file, keeping the versions that are in it where they still fit. Returns uv's exit status."""
    output = LOCKS / f"{extra}.txt"
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("\n".join(TESTED_ON_GPU if extra == "gpu" else ()))
        status = subprocess.run(command(extra, constraints, output), cwd=ROOT, check=False).returncode
    if status == 0:
        output.write_text(ABOUT + output.read_text().removeprefix(ABOUT))
    return status


if __name__ == "__main__":
    sys.exit(max(lock(extra) for extra in ("cpu", "gpu")))
