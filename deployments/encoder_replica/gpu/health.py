"""Faults of a replica's device, which `Completion` derives from the errors of its batches.

After a CUDA error, nothing in the process can use the device any more. Running out of memory may pass; if it persists,
the replica is useless too.
"""

from __future__ import annotations

from enum import Enum

MAX_OUT_OF_MEMORY_IN_A_ROW = 6
"""Consecutive out-of-memory errors of images encoded alone. Exceeds the attempts per request, so it takes two."""


class Fault(Enum):
    """Why a device failed permanently; the metric's label `reason`."""

    CUDA_ERROR = "cuda_error"
    OUT_OF_MEMORY = "out_of_memory"
