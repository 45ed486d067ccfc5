"""Splits GPUs into parts with CUDA's Multi-Process Service, each with a share of the multiprocessors.

A few GPUs can then represent more and smaller ones; the parts of a GPU share its memory, bandwidth and clock
(https://docs.nvidia.com/deploy/mps). No setting of a GPU is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
QUIT_S = 10.0


@contextmanager
def split_gpu(parts: int, scratch: Path) -> Iterator[Mapping[str, str]]:
    """Yields variables with which a program uses one of `parts` parts of the GPU that it sees; one part is all of it.

    Raises SystemExit if the driver's program is missing, RuntimeError if it does not start.
    """
    if parts == 1:
        yield {}
        return
    if shutil.which(PROGRAM) is None:
        raise SystemExit(f"{parts} parts of a GPU need {PROGRAM}, which comes with the driver")
    folder = scratch / "mps"
    folder.mkdir()
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 / parts:g}",
    }
    environment = {**os.environ, **variables}
    started = subprocess.run([PROGRAM, "-d"], env=environment, capture_output=True, text=True, check=False)
    if started.returncode:
        raise RuntimeError(f"{PROGRAM} ended with {started.returncode}: {started.stdout}{started.stderr}")
    try:
        yield variables
    finally:
        subprocess.run(
            [PROGRAM], env=environment, input="quit\n", text=True, timeout=QUIT_S, capture_output=True, check=False
        )
