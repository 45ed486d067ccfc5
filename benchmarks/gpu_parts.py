"""GPUs cut into parts by CUDA's Multi-Process Service, each with its share of the multiprocessors.

So a few GPUs stand for more and smaller ones; memory, its bandwidth and the clock are the GPU's, which its parts share
(https://docs.nvidia.com/deploy/mps). It changes no setting of a GPU. It must not know what runs on the parts.
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
def cut(parts: int, scratch: Path) -> Iterator[Mapping[str, str]]:
    """Variables with which a program uses one of so many parts of the GPU that it sees; one part is all of it.

    Raises SystemExit where the driver's program is not there, RuntimeError where it does not start.
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
