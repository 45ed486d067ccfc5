"""Parts of a GPU, with a stand-in for the program of CUDA's Multi-Process Service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.serving import gpu_parts

PROGRAM = """#!/bin/sh
if [ "$1" = -d ]; then
    echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PIPE_DIRECTORY" > "$TOLD"; exit $STARTS
fi
cat >> "$TOLD"
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the program of the Multi-Process Service has been told, by one in its place."""
    program = tmp_path / "bin" / gpu_parts.PROGRAM
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("STARTS", "0")
    return tmp_path / "told"


def test_parts_are_there_while_something_runs_on_them(control: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    with gpu_parts.split_gpu(2, tmp_path) as variables:
        assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        pipe = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
        assert control.read_text() == f"50 {pipe}\n"
    assert control.read_text() == f"50 {pipe}\nquit\n"
    assert dict(os.environ) == before


def test_parts_that_cannot_be_had_are_told(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTS", "3")
    with pytest.raises(RuntimeError, match="nvidia-cuda-mps-control ended with 3"), gpu_parts.split_gpu(2, tmp_path):
        pytest.fail("begun without it")
    assert control.read_text().count("quit") == 0
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(SystemExit, match="2 parts of a GPU need nvidia-cuda-mps-control"),
        gpu_parts.split_gpu(2, tmp_path),
    ):
        pytest.fail("begun without it")


def test_one_part_is_all_of_a_gpu(control: Path, tmp_path: Path) -> None:
    with gpu_parts.split_gpu(1, tmp_path) as variables:
        assert variables == {}
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not control.exists()
