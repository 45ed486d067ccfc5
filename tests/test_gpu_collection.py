"""`tests/gpu` runs on a GPU machine that has PyTorch and no packages for serving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABSENT = ("cachetools", "fastapi", "msgspec", "pybase64", "ray", "vllm")
IMPORTS = f"""
import importlib, pathlib, sys
import pytest
sys.modules |= dict.fromkeys({ABSENT!r})
for path in sorted(pathlib.Path("tests/gpu").glob("test_*.py")):
    try:
        importlib.import_module(f"tests.gpu.{{path.stem}}")
        print(path.stem)
    except pytest.skip.Exception as skipped:
        print(path.stem, skipped)
"""


def test_gpu_tests_need_no_packages_for_serving() -> None:
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    collected = done.stdout.splitlines()
    assert len(collected) == len(list((ROOT / "tests/gpu").glob("test_*.py")))
    assert [line for line in collected if " " in line] == [
        "test_transfer_gpu processes of one host exchange msgspec messages"
    ]
