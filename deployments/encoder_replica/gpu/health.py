"""Health of a replica's device, derived from the errors of its batches.

After a CUDA error, nothing in the process can use the device any more. Running out of memory may pass; if it persists,
the replica is useless too.
"""

from __future__ import annotations

import threading
from enum import Enum

from encoder.device_errors import is_cuda_error, is_out_of_memory

MAX_OUT_OF_MEMORY_IN_A_ROW = 6
"""Consecutive out-of-memory errors of images encoded alone. Exceeds the attempts per request, so it takes two."""


class Fault(Enum):
    """Why a device failed permanently; the metric's label `reason`."""

    CUDA_ERROR = "cuda_error"
    OUT_OF_MEMORY = "out_of_memory"


class DeviceHealth:
    """Health of one device. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_out_of_memory = 0
        self.fault: Fault | None = None
        """Once set, it stays."""

    def record_success(self) -> None:
        """Records that a batch was encoded."""
        with self._lock:
            self._num_out_of_memory = 0

    def record_failure(self, error: BaseException, *, alone: bool) -> bool:
        """Records that a batch failed, and returns whether the device thereby failed permanently.

        `alone`: whether the batch was one image, which is not retried.
        """
        with self._lock:
            before = self.fault
            if is_cuda_error(error):
                self.fault = Fault.CUDA_ERROR
            elif alone and is_out_of_memory(error):
                self._num_out_of_memory += 1
                if self._num_out_of_memory >= MAX_OUT_OF_MEMORY_IN_A_ROW:
                    self.fault = self.fault or Fault.OUT_OF_MEMORY
            return before is None and self.fault is not None
