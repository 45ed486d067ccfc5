"""Writes `locks/cpu.txt` and `locks/gpu.txt`: every package of an installation, with one version and its file hashes.

Run by `make lock` after a change of pyproject.toml, or to update versions. The GPU lock is constrained to the versions
that were tested on a GPU. The CPU lock does not contain torch, whose CPU build is not on PyPI: pyproject.toml pins it,
and if uv cannot find it, PIP_FIND_LINKS names a folder that contains it. `scripts/setup.py` installs the locked
versions; the Dockerfile also checks the hashes.
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
# Tested on an NVIDIA H200, see docs/install.md; pyproject.toml allows newer versions, which the lock does not contain.
TESTED_ON_GPU = ("vllm==0.26.0", "torch==2.11.0", "transformers==5.17.0")
ABOUT = """\
# Written by scripts/lock.py (make lock). For Python 3.11 and newer; lines with a marker are for some machines only.
"""


def command(extra: str, constraints: Path, output: Path) -> list[str]:
    """Returns the uv command. It resolves for all platforms, so that one file serves every Python and processor."""
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
    """Writes one lock file, keeping its versions that still satisfy the requirements. Returns uv's exit status."""
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
